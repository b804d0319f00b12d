"""gateway.toml: the settings (also flags and variables), the upstreams and the aliases.

Secrets never stand in the file: an upstream's key comes from an environment variable or a file that it names.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from firsttoken.config import check_variables, did_you_mean, parse, settings_of
from firsttoken.engine.config import ConfigError, setting

RESTART_SETTINGS = (
    "host",
    "port",
    "workers",
    "state_dir",
    "database",
    "metrics_port",
    "console",
    "console_port",
    "max_connections",
    "max_header_bytes",
    "request_read",
)
"""Settings that SIGHUP can't change: a change of one is logged, and takes effect at the next start."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GatewayConfig:
    """The settings of `firsttoken gateway`. Times are in seconds."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", min=0, max=65535)
    root_path: str = setting("", "Path prefix under which a proxy serves this gateway, as /api.")
    workers: int = setting(1, "Processes that share the port; limits hold across them.", min=1, max=256)
    state_dir: str = setting(
        "~/.local/state/firsttoken", "Folder of the journals and, by default, the database."
    )
    database: str = setting(
        "", "sqlite:///FILE, or postgresql://USER@HOST/NAME. Default: gateway.db in state_dir."
    )
    default_model: str | None = setting(None, "Model of requests that name none.")
    retries: int = setting(2, "Further upstreams or fallbacks tried before the first byte.", min=0, max=10)
    metrics_port: int | None = setting(
        None,
        "Serve /metrics on this port, without a key. Default: on the main port, for admin keys.",
        min=0,
        max=65535,
    )
    metrics_token_env: str | None = setting(
        None, "Environment variable with a token that may read /metrics, beside admin keys."
    )
    console: bool = setting(True, "Start the console.")
    console_port: int = setting(8081, "Port of the console.", min=0, max=65535)
    max_streams: int = setting(
        4096, "Requests relayed at once, per process; further ones get status 503.", min=1
    )
    max_connections: int = setting(8192, "Connections open at once, per process; above max_streams.", min=2)
    max_body_mib: int = setting(32, "Largest request body, in MiB; a larger one gets status 413.", min=1)
    max_header_bytes: int = setting(
        65536, "Largest request head, in bytes; a larger one gets status 431.", min=1024
    )
    request_read: float = setting(
        30.0,
        "A request must have arrived whole after this time; also the longest idle connection.",
        unit="s",
        min=0.1,
    )
    connect: float = setting(5.0, "Longest wait for a connection to an upstream.", unit="s", min=0.01)
    first_byte: float = setting(300.0, "Longest wait for an upstream's first byte.", unit="s", min=0.01)
    idle: float = setting(
        120.0,
        "Longest silence of an upstream within an answer, and of a client that does not read it.",
        unit="s",
        min=0.01,
    )
    ping: float | None = setting(
        None,
        "Send `: ping` comments into streams that stay silent this long before the first token.",
        unit="s",
        min=0.01,
    )
    drain: float = setting(60.0, "After SIGTERM, how long running requests may go on.", unit="s", min=0)
    health_interval: float = setting(5.0, "Time between health checks of an upstream.", unit="s", min=0.1)
    default_output_tokens: int = setting(
        512, "Output reserved against token limits by a request without max_tokens.", min=0
    )
    retain_requests_days: float = setting(30.0, "Days for which single requests are kept.", min=0.01)
    retain_minutes_days: float = setting(
        14.0, "Days for which figures per minute are kept (per day: for ever).", min=0.01
    )


class UpstreamConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[[upstreams]]: one OpenAI-compatible server."""

    name: str
    base_url: str
    """With or without /v1 at the end."""
    models: list[str] = []
    """Model names at the upstream; empty: asked for at its /v1/models."""
    api_key_env: str | None = None
    api_key_file: str | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How much load it takes, next to others that serve the same model."""
    priority: bool = False
    """The upstream orders by the `priority` field (our server; vLLM with --scheduling-policy priority)."""
    stream_usage: bool = True
    """The upstream knows `stream_options.include_usage`, by which streams are accounted exactly."""
    ca_file: str | None = None
    """Certificates to trust for this upstream, beside the system's."""
    keepalive_seconds: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    """Idle sockets are closed after this; it must be below the upstream's own limit (5 s at uvicorn)."""

    def api_key(self) -> str | None:
        """Raises ConfigError; the key itself is in no message."""
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key:
                raise ConfigError(
                    f"upstream {self.name}: the environment variable {self.api_key_env} is not set"
                )
            return key
        if self.api_key_file:
            try:
                return Path(self.api_key_file).expanduser().read_text().strip()
            except OSError as error:
                raise ConfigError(f"upstream {self.name}: api_key_file: {error.strerror}") from None
        return None

    @property
    def root(self) -> str:
        return re.sub(r"/+$", "", re.sub(r"/v1/*$", "", self.base_url))


class AliasConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """[aliases.NAME]: a name for clients, the model behind it, and what to try when that fails."""

    model: str
    fallbacks: list[str] = []


@dataclass(slots=True, frozen=True, kw_only=True)
class Config:
    gateway: GatewayConfig
    upstreams: tuple[UpstreamConfig, ...]
    aliases: dict[str, AliasConfig]

    @property
    def state_dir(self) -> Path:
        return Path(self.gateway.state_dir).expanduser().absolute()

    @property
    def database_url(self) -> str:
        return self.gateway.database or f"sqlite:///{self.state_dir / 'gateway.db'}"


def load(path: Path | None, flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Config:
    """The file, overridden by the environment, overridden by flags. ConfigError names the key to change."""
    content: dict[str, Any] = {}
    if path is not None:
        try:
            content = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"--config {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {path} is not TOML: {error}") from None
    environment = os.environ if environment is None else environment
    place = str(path or "gateway")
    config = Config(
        upstreams=tuple(
            _convert(content.pop("upstreams", []), list[UpstreamConfig], f"{place}: [[upstreams]]")
        ),
        aliases=_convert(content.pop("aliases", {}), dict[str, AliasConfig], f"{place}: [aliases]"),
        gateway=_settings(content, flags, environment, place),
    )
    _check(config, place)
    return config


def _settings(
    content: Mapping[str, Any], flags: Mapping[str, Any], environment: Mapping[str, str], place: str
) -> GatewayConfig:
    settings = settings_of(GatewayConfig)
    check_variables(environment, settings)
    for key in content:
        if key.replace("-", "_") not in settings:
            raise ConfigError(
                f"{place}: unknown key {key!r}{did_you_mean(key, [*settings, 'upstreams', 'aliases'])}"
            )
    from_file = {key.replace("-", "_"): value for key, value in content.items()}
    values = {}
    for name, one in settings.items():
        if flags.get(name) is not None:
            values[name] = parse(one, flags[name], one.flag)
        elif one.variable in environment:
            values[name] = parse(one, environment[one.variable], one.variable)
        elif name in from_file:
            values[name] = parse(one, from_file[name], f"{name} in {place}")
    return GatewayConfig(**values)


def _check(config: Config, place: str) -> None:
    names = [upstream.name for upstream in config.upstreams]
    for upstream in config.upstreams:
        if names.count(upstream.name) > 1:
            raise ConfigError(f"{place}: two upstreams are called {upstream.name!r}")
        if not re.match(r"https?://[^/@]+", upstream.base_url):
            raise ConfigError(
                f"{place}: upstream {upstream.name}: base_url must be http(s)://HOST[:PORT][/v1]"
            )
        if upstream.api_key_env and upstream.api_key_file:
            raise ConfigError(
                f"{place}: upstream {upstream.name}: give api_key_env or api_key_file, not both"
            )
        upstream.api_key()
    settings = config.gateway
    if settings.root_path and not re.fullmatch(r"(/[^/?#]+)+", settings.root_path):
        raise ConfigError(f"{place}: root_path must start with / and not end with it, as /api")
    if settings.max_connections <= settings.max_streams:
        raise ConfigError(
            f"{place}: max_connections must be above max_streams, so that refusals can be answered"
        )
    if settings.metrics_token_env and not os.environ.get(settings.metrics_token_env):
        raise ConfigError(f"{place}: the environment variable {settings.metrics_token_env} is not set")


def restart_needed(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Settings that differ and that a running gateway can't change."""
    return [name for name in RESTART_SETTINGS if getattr(old, name) != getattr(new, name)]


def replaced(old: GatewayConfig, new: GatewayConfig) -> GatewayConfig:
    """The new settings, with the old values of those that need a restart."""
    return dataclasses.replace(new, **{name: getattr(old, name) for name in RESTART_SETTINGS})


def _convert(value: Any, kind: Any, place: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None
