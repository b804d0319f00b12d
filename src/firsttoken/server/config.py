"""The HTTP server's settings; the engine's are in `firsttoken.engine.config`."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.engine.config import setting


@dataclass(slots=True, kw_only=True)
class ServerConfig:
    """Settings of `firsttoken serve` that are not the engine's."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = setting("", "Path prefix under which a proxy serves this server.")
    allowed_origins: list[str] = setting(
        (), "Origins of browser pages that may call the server (CORS), or *. Default: none."
    )
    api_key: list[str] = setting((), "Key that clients must send; several are allowed. Default: none.")
    served_model_name: list[str] = setting(
        (), "Name of the model in the API; the first of several is the one answered. Default: MODEL as given."
    )
    chat_template: str | None = setting(None, "Jinja file to use instead of the model's own chat template.")
    generation_config: str = setting(
        "auto",
        "Where defaults for sampling come from: auto (the model folder's generation_config.json), vllm (none:"
        " the API's own defaults), or a folder with a generation_config.json.",
    )
    max_body_mib: int = setting(32, "Largest request body, in MiB; a larger one gets status 413.")
    drain_seconds: float = setting(
        30.0, "After SIGTERM, how long running requests may go on before they are ended."
    )
    access_log: bool = setting(False, "Log a line per request.")
    dev_mode: bool = setting(
        False,
        "Serve /settings, /reset_prefix_cache and /reconfigure, which benchmarks use. Not for the public.",
    )
