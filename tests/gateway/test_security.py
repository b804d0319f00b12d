"""What a hostile client can't do: read others, see keys, or stop the service for anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlparse

import aiohttp
import pytest

from .running import GatewayProgram, Program, chat

MIB = 1 << 20


@pytest.fixture
async def small(upstream: Program, tmp_path: Path) -> AsyncIterator[GatewayProgram]:
    """A gateway with small caps."""
    upstreams = [{"name": "m", "base_url": upstream.url, "models": ["mock"]}]
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams, request_read="1s", max_body_mib=1)
    yield gateway
    await asyncio.to_thread(gateway.stop)


def address(gateway: GatewayProgram) -> tuple[str, int]:
    url = urlparse(gateway.url)
    assert url.hostname
    assert url.port
    return url.hostname, url.port


def head_of(gateway: GatewayProgram, length: int) -> str:
    """The head of a chat request with a body of `length` bytes."""
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {gateway.admin}\r\nContent-Length: {length}\r\n\r\n"
    )


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 10)
    return b""


async def fine(gateway: GatewayProgram) -> None:
    """Somebody else is served, and soon."""
    started = time.monotonic()
    headers = {"Authorization": f"Bearer {gateway.admin}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/v1/chat/completions", json=chat(), headers=headers) as answer,
    ):
        assert answer.status == 200
    assert time.monotonic() - started < 5


async def test_every_route_but_health_needs_a_key(gateway: GatewayProgram) -> None:
    routes = ["/v1/models", "/v1/usage", "/metrics", "/admin/v1/keys", "/admin/v1/usage", "/v1/models/mock"]
    for route in routes:
        assert gateway.call("GET", route, key="ft-guess")[0] == 401, route
    for route in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
    ):
        assert gateway.call("POST", route, {}, key="ft-guess")[0] == 401, route
    assert gateway.call("GET", "/health", key="")[0] == 200


async def test_clients_get_nothing_of_admins_or_each_other(gateway: GatewayProgram) -> None:
    one, two = gateway.make_key("one", models=["mock"]), gateway.make_key("two", models=["other"])
    assert gateway.call("POST", "/v1/chat/completions", chat(), one)[0] == 200
    for method, path in (
        ("GET", "keys"),
        ("POST", "keys"),
        ("GET", "requests"),
        ("GET", "audit"),
        ("PUT", "models/aliases/chat"),
        ("DELETE", "keys/admin"),
    ):
        assert gateway.call(method, f"/admin/v1/{path}", None if method == "GET" else {}, one)[0] == 403
    await asyncio.sleep(0.6)
    usage = gateway.call("GET", "/v1/usage?key=one", key=two)[1]
    assert usage["key"]["name"] == "two"
    assert usage["data"] == []
    status, answer = gateway.call("POST", "/v1/chat/completions", chat(), two)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert gateway.call("GET", "/v1/models", key=two)[1]["data"] == []


async def test_keys_are_shown_once_and_nowhere_else(gateway: GatewayProgram) -> None:
    secret = gateway.make_key("secret-one", rpm=0)
    gateway.call("POST", "/v1/chat/completions", chat(), secret)
    rotated = gateway.call("POST", "/admin/v1/keys/secret-one/rotate")[1]["secret"]
    assert gateway.call("GET", "/v1/models", key=secret)[0] == 401
    assert gateway.call("GET", "/v1/models", key=rotated)[0] == 200
    gateway.call("POST", "/v1/chat/completions", {"model": rotated}, rotated)
    await asyncio.sleep(0.6)
    shown = [
        gateway.call("GET", f"/admin/v1/{path}")[1]
        for path in ("keys", "keys/secret-one", "audit", "requests", "usage?by=key", "models")
    ]
    shown.append(gateway.call("GET", "/metrics")[1])
    for one in (secret, rotated):
        assert one not in json.dumps(shown)
        for path in gateway.folder.rglob("*"):
            assert not path.is_file() or one.encode() not in path.read_bytes(), path
    gateway.call("POST", "/admin/v1/keys/secret-one/revoke")
    assert gateway.call("GET", "/v1/models", key=rotated)[0] == 401


async def test_an_expired_key_ends(gateway: GatewayProgram) -> None:
    end = time.time() + 1
    key = gateway.make_key("short", expires_at=end)
    assert gateway.call("GET", "/v1/models", key=key)[0] == 200
    while time.time() <= end + 0.1:  # by the wall clock, as the gateway does
        await asyncio.to_thread(time.sleep, 0.1)
    assert gateway.call("GET", "/v1/models", key=key)[1]["error"]["code"] == "expired_api_key"


async def test_a_body_of_100_mb_is_refused_early(small: GatewayProgram) -> None:
    reader, writer = await asyncio.open_connection(*address(small))
    head = head_of(small, 100 * MIB)
    writer.write(head.encode())
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 100 * MIB and not reader.at_eof():
            writer.write(b" " * MIB)
            await writer.drain()
            sent += MIB
    assert sent < 100 * MIB, "it was read to the end"
    writer.close()
    await fine(small)


async def test_a_header_of_1_mb_is_refused(small: GatewayProgram) -> None:
    for name in (b"X-Long: ", b"GET /"):  # one header, and one endless request line
        reader, writer = await asyncio.open_connection(*address(small))
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\n" + name + b"a" * MIB if name != b"GET /" else name + b"a" * MIB
        )
        answer = await until_closed(reader)
        assert answer == b"" or b" 431 " in answer.split(b"\r\n")[0] or b" 400 " in answer.split(b"\r\n")[0]
        writer.close()
    await fine(small)


async def test_slow_clients_are_cut_off(small: GatewayProgram) -> None:
    async def drip(head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*address(small))
        writer.write(head)
        closed = asyncio.create_task(until_closed(reader))
        with contextlib.suppress(ConnectionError):
            while not closed.done():
                writer.write(b"a")
                await asyncio.sleep(0.2)
        writer.close()
        return await closed

    head = head_of(small, 5000)
    slow_head, slow_body = await asyncio.gather(drip(b"GET / HTTP/1.1\r\nX-Slow: "), drip(head.encode()))
    assert b" 408 " in slow_head
    assert b" 408 " in slow_body
    await fine(small)


async def test_a_thousand_idle_connections_stop_nobody(small: GatewayProgram) -> None:
    connections = await asyncio.gather(*(asyncio.open_connection(*address(small)) for _ in range(1000)))
    await fine(small)
    answers = await asyncio.gather(*(until_closed(reader) for reader, _ in connections))
    assert answers == [b""] * 1000, "they are closed after the read time"
    for _, writer in connections:
        writer.close()
    await fine(small)


async def test_a_client_that_reads_nothing_stops_nobody(small: GatewayProgram) -> None:
    _, writer = await asyncio.open_connection(*address(small))
    body = json.dumps(chat(20_000, stream=True, mock={"itl_ms": 0, "ttft_ms": 0})).encode()
    head = head_of(small, len(body))
    writer.write(head.encode() + body)
    await asyncio.sleep(0.5)
    await fine(small)
    writer.close()
