"""`python -m firsttoken.gateway.console --gateway URL --port N`: the console as a program of its own.

`firsttoken gateway` starts it and hands it a listening socket; by hand it can watch a gateway elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys

import uvicorn

from firsttoken.listening import listen

PARENT_CHECK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m firsttoken.gateway.console", description=__doc__)
    parser.add_argument("--gateway", required=True, metavar="URL", help="address of the gateway")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8081, help="port to listen on; 0 takes a free one")
    parser.add_argument("--fd", type=int, help="listen on this open socket instead")
    parser.add_argument("--parent", type=int, help="end when this process is no longer the parent")
    given = parser.parse_args()
    if not given.gateway.startswith(("http://", "https://")):
        parser.error(f"--gateway {given.gateway}: must be http(s)://HOST[:PORT]")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s console %(levelname)s %(message)s")
    listener = (
        socket.socket(fileno=given.fd) if given.fd is not None else _bind(parser, given.host, given.port)
    )
    try:
        asyncio.run(_serve(given.gateway.rstrip("/"), listener, given.parent))
    except KeyboardInterrupt:
        sys.exit(130)


def _bind(parser: argparse.ArgumentParser, host: str, port: int) -> socket.socket:
    try:
        listener = listen(host, port)
    except (OSError, OverflowError) as error:
        parser.error(f"--port {port} on {host}: {getattr(error, 'strerror', None) or error}; choose another")
    host = f"[{host}]" if ":" in host else host
    print(f"console ready on http://{host}:{listener.getsockname()[1]}", flush=True)
    return listener


async def _serve(url: str, listener: socket.socket, parent: int | None) -> None:
    # Imported here: `python -m … --help` and a wrong flag need not wait for NiceGUI.
    from firsttoken.gateway.console.app import Console, make_app
    from firsttoken.gateway.console.client import Gateway

    server = uvicorn.Server(
        uvicorn.Config(
            make_app(Console(Gateway(url))),
            log_config=None,
            access_log=False,
            server_header=False,
            ws_max_size=1 << 20,
            timeout_graceful_shutdown=2,
        )
    )
    watch = asyncio.create_task(_end_with(parent, server)) if parent is not None else None
    await server.serve(sockets=[listener])
    if watch is not None:
        watch.cancel()


async def _end_with(parent: int, server: uvicorn.Server) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 (no event tells of a parent's death, on every system)
        await asyncio.sleep(PARENT_CHECK_S)
    server.should_exit = True


if __name__ == "__main__":
    main()
