"""`firsttoken serve`: the socket first, then engine and HTTP side by side, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from firsttoken import __version__
from firsttoken.backends.base import Backend
from firsttoken.engine.config import ConfigError
from firsttoken.http_protocol import OneWriteProtocol
from firsttoken.listening import BACKLOG, listen
from firsttoken.observe.prometheus import ServerMetrics
from firsttoken.server.app import App
from firsttoken.server.config import ServerConfig
from firsttoken.server.serving import Serving, load_text_parts

log = logging.getLogger("firsttoken.server")

KEEP_ALIVE_S = 75
"""Idle connections stay open for longer than clients keep them in their pools, so that it is the client that
closes: a server that closes first makes sporadic failures."""
FORCED_END_S = 1.0


def serve(
    config: ServerConfig,
    model_folder: Path,
    model_name: str,
    make_backend: Callable[[Callable[[str], None]], Backend],
    say: Callable[[str], None] = print,
) -> int:
    """Serves until a signal ends it; returns the exit code. Raises ConfigError or BackendError with one line.

    `make_backend(on_fatal)` makes the engine; `on_fatal(reason)` is for it to say that it is down for good.
    """
    sock = bind(config)  # before the model is loaded: a port in use is said at once
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, sock, model_folder, model_name, make_backend, say))
    finally:
        sock.close()
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)


async def _serve(
    config: ServerConfig,
    sock: socket.socket,
    model_folder: Path,
    model_name: str,
    make_backend: Callable[[Callable[[str], None]], Backend],
    say: Callable[[str], None],
) -> int:
    began = time.monotonic()
    app = App(config)
    server = HttpServer(app, config)
    exit_code = 0

    def on_fatal(reason: str) -> None:
        nonlocal exit_code
        exit_code = 1
        server.should_exit = True

    backend = make_backend(on_fatal)
    http = asyncio.create_task(server.serve(sockets=[sock]))
    start = asyncio.create_task(start_serving(backend, config, model_folder, model_name))
    try:
        await asyncio.wait({http, start}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():  # a signal came while the model was being loaded
            return exit_code
        app.serving = start.result()
        for line in banner(app.serving, config, sock, time.monotonic() - began):
            say(line)
        await http
        return exit_code
    finally:
        server.should_exit = True
        start.cancel()
        await asyncio.wait({start})
        await backend.close()
        done, _ = await asyncio.wait({http}, timeout=FORCED_END_S)
        if not done:
            http.cancel()


async def start_serving(
    backend: Backend, config: ServerConfig, model_folder: Path, model_name: str
) -> Serving:
    """Starts the engine and reads tokenizer and template meanwhile; returns when requests can be answered."""
    engine = asyncio.create_task(backend.start())
    try:
        text = await asyncio.to_thread(load_text_parts, model_folder, config)
        await engine
    finally:
        engine.cancel()
        await asyncio.wait({engine})
    names = list(config.served_model_name) or [model_name]
    metrics = ServerMetrics(names[0], backend.stats, lambda: backend.healthy)
    return Serving(backend, text, names, metrics)


class HttpServer(uvicorn.Server):
    """uvicorn, ended as a service manager expects: the first signal drains, the second ends at once."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app = app
        self._drain_seconds = config.drain_seconds
        super().__init__(
            uvicorn.Config(
                _with_cors(app, config),
                http=OneWriteProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="info" if config.access_log else "warning",
                access_log=config.access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(config.drain_seconds + 2),
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self._app.end_requests()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = asyncio.get_running_loop().call_later(self._drain_seconds, self._app.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()


def _with_cors(app: App, config: ServerConfig) -> Any:
    if not config.allowed_origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Server-Timing"],
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop
    return None


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError that names the flag."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        return listen(config.host, config.port)
    except (socket.gaierror, OverflowError) as error:
        raise ConfigError(f"--host {config.host} --port {config.port} is no address: {error}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use: choose another with --port (0: a free one)"
            ) from None
        raise ConfigError(
            f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}"
        ) from None


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path} is in use by another server")
            os.unlink(path)  # left behind by a server that was killed
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return sock


def banner(serving: Serving, config: ServerConfig, sock: socket.socket, seconds: float) -> list[str]:
    """What is served and how, in a few lines."""
    info = serving.backend.info
    stages = ", ".join(f"{name} {value:.1f}" for name, value in info.startup.items())
    speculation = serving.backend.stats().speculation
    policy = info.settings.get("speculation", "off")
    reason = speculation.get("reason")
    lines = [
        f"firsttoken {__version__}: {', '.join(serving.names)}",
        f"  device       {info.device}, {info.dtype}",
        f"  KV cache     {info.num_kv_blocks * info.block_size:,} tokens ({info.num_kv_blocks:,} blocks of"
        f" {info.block_size}); context {info.max_model_len:,}; up to {info.max_num_seqs} sequences a step",
        f"  speculation  {policy}" + (f": {reason}" if reason else ""),
        f"  ready in     {seconds:.1f} s" + (f" ({stages})" if stages else ""),
    ]
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if config.uds is not None:
        address, target = config.uds, f"--unix-socket {config.uds} http://localhost"
    else:
        host, port = sock.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        address = target = f"http://{host}:{port}"
    route = "chat/completions"
    if serving.text.template is None:
        route, body = "completions", '{"prompt": "Hello"}'
    key = ' -H "Authorization: Bearer KEY"' if config.api_key else ""
    lines += [
        f"  address      {address}{config.root_path}",
        f"  try          curl {target}/v1/{route}{key} -d '{body}'",
    ]
    return lines
