"""`firsttoken up MODEL`: the server and the gateway before it, in one command."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import typer

UPSTREAM_KEY = "FIRSTTOKEN_UP_SECRET"
START_LIMIT_S = 1800.0
"""A first start may download the model."""
STOP_LIMIT_S = 40.0


def register(app: typer.Typer) -> None:
    app.command("up", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(up)


def up(
    context: typer.Context,
    model: str = typer.Argument(help="A built-in name (smollm2-135m), a hub id (org/name) or a folder."),
    host: str = typer.Option("127.0.0.1", help="Address of the gateway."),
    port: int = typer.Option(8080, help="Port of the gateway; 0 takes a free one."),
    state_dir: str | None = typer.Option(None, help="Folder of the gateway's database and journals."),
    console: bool = typer.Option(True, help="Start the console."),
    console_port: int = typer.Option(8081, help="Port of the console; 0 takes a free one."),
) -> None:
    """Serve a model behind a gateway, with one command.

    Further flags go to `firsttoken serve`. The first start shows an admin key, this once.
    """
    from firsttoken.gateway.config import UpstreamConfig, load
    from firsttoken.gateway.serve import Gateway

    flags = {
        "host": host,
        "port": str(port),
        "state_dir": state_dir,
        "console": console,
        "console_port": str(console_port),
    }
    config = load(None, flags)
    upstream = UpstreamConfig(
        name="local", base_url=f"http://127.0.0.1:{_free_port()}", api_key_env=UPSTREAM_KEY, priority=True
    )
    os.environ[UPSTREAM_KEY] = secrets.token_urlsafe(32)
    # Until the gateway takes SIGTERM over, it ends this process by way of `finally`, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    server = _start(model, upstream.root.rpartition(":")[2], context.args)
    try:
        _wait_until_ready(server, upstream.root)
        code = Gateway(dataclasses.replace(config, upstreams=(upstream,)), None, flags).run()
    finally:
        _stop(server)
    raise typer.Exit(code)


def _start(model: str, port: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    """`firsttoken serve` on a port of this machine; its key is known to the gateway alone."""
    command = [sys.executable, "-m", "firsttoken", "serve", model, "--host", "127.0.0.1", "--port", port]
    environment = os.environ | {"FIRSTTOKEN_API_KEY": os.environ[UPSTREAM_KEY]}
    # A session of its own: Ctrl-C reaches the gateway first, which drains before the server ends.
    return subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], root: str) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until:
        if server.poll() is not None:
            raise typer.Exit(server.returncode or 1)  # it has said why
        try:
            with urllib.request.urlopen(f"{root}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    print(f"error: the server was not ready after {START_LIMIT_S:.0f} s", file=sys.stderr)
    raise typer.Exit(1)


def _stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
