"""Several workers behind one port: metrics of all from any, and a client that stops reading costs only itself."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlparse

from .running import GatewayProgram, Program, call, chat

REQUESTS = 40


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_metrics_are_of_all_workers_and_a_client_that_does_not_read_is_cut(
    upstream: Program, tmp_path: Path
) -> None:
    one = {"name": "m", "base_url": upstream.url, "models": ["mock"]}
    gateway = GatewayProgram(tmp_path, [one], workers=2, idle="1s")
    try:
        key = gateway.make_key("counted")
        with ThreadPoolExecutor(8) as threads:
            ask = [
                threads.submit(call, "POST", f"{gateway.url}/v1/chat/completions", chat(2), key)
                for _ in range(REQUESTS)
            ]
            assert {one.result()[0] for one in ask} == {200}
        # Each scrape is answered by one worker, which knows the other's numbers from at most two seconds ago.
        until(lambda: counted(gateway) == REQUESTS)
        assert {row["status"] for row in gateway.rows()} == {"ok"}

        reader = unread_stream(gateway, key)
        until(lambda: [row["status"] for row in gateway.rows(limit=1)] == ["aborted"])
        assert call("GET", f"{upstream.url}/seen")[1]["in_flight"] == 0
        reader.close()
    finally:
        gateway.stop()


def counted(gateway: GatewayProgram) -> float:
    text = gateway.call("GET", "/metrics")[1]
    found = re.search(r'gateway_key_requests_total\{key="counted",status="ok"\} (\S+)', text)
    return float(found[1]) if found else 0.0


def unread_stream(gateway: GatewayProgram, key: str) -> socket.socket:
    """Asks for more than sockets buffer, and reads nothing of it."""
    address = urlparse(gateway.url)
    body = json.dumps(chat(800_000, stream=True, mock={"itl_ms": 0, "tokens_per_chunk": 4000})).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection
