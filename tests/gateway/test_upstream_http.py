"""The client towards upstreams, before servers that answer in all ways of HTTP/1.1 and some that aren't."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.gateway.upstream_http import (
    HIGH_WATER,
    Lost,
    Silent,
    Unreachable,
    UpstreamError,
    UpstreamHttp,
)

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Script = Callable[[int, Writer], Awaitable[bool]]
"""(number of the request on its connection, where to answer) → whether the connection stays open."""


class Server:
    """A server that reads requests as they should be and answers by a script."""

    def __init__(self, script: Script):
        self.script = script
        self.requests: list[tuple[int, bytes]] = []
        """(number on its connection, the request's bytes)."""
        self.connections = self.departures = 0

    async def serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        nth = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1])) if length else b""
                self.requests.append((nth, head + body))
                if not await self.script(nth, writer):
                    break
                nth += 1
        self.departures += 1
        writer.close()


@contextlib.asynccontextmanager
async def running(
    script: Script,
    connect_s: float = 5.0,
    keepalive_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
    ca_file: str | None = None,
) -> AsyncIterator[tuple[Server, UpstreamHttp]]:
    scripted = Server(script)
    listener = await asyncio.start_server(scripted.serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    scheme = "https" if tls else "http"
    http = UpstreamHttp(f"{scheme}://127.0.0.1:{port}/base", connect_s, keepalive_s, ca_file)
    try:
        yield scripted, http
    finally:
        http.close()
        listener.close()


def answer(*pieces: bytes, keep: bool = True, pause: float = 0.0) -> Script:
    async def script(nth: int, writer: Writer) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return keep

    return script


async def ask(http: UpstreamHttp, body: bytes = b"{}", limit: float = 5.0) -> tuple[int, bytes]:
    got = await http.request("POST", "/v1/x", "Content-Type: application/json\r\n", body, limit)
    whole = b""
    while data := await got.read(limit):
        whole += data
    return got.status, whole


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110 (the server is a stranger: it sets no event)
            await asyncio.sleep(0.01)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "keep", "expected"),
    [
        ([OK], True, (200, b"hi")),
        ([OK[:20], OK[20:41], OK[41:]], True, (200, b"hi")),
        ([CHUNKED + b"2\r\nhi\r\n", b"1\r\n!\r\n0\r\n\r\n"], True, (200, b"hi!")),
        ([b"HTTP/1.1 200 OK\r\n\r\nuntil the end"], False, (200, b"until the end")),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK], True, (200, b"hi")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], True, (204, b"")),
        ([b"HTTP/1.1 429 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"], False, (429, b"")),
    ],
)  # fmt: skip
async def test_answers_of_every_kind(pieces: list[bytes], keep: bool, expected: tuple[int, bytes]) -> None:
    async with running(answer(*pieces, keep=keep, pause=0.01)) as (server, http):
        for _ in range(2):
            assert await ask(http, b'{"a":1}') == expected
    assert server.connections == (1 if keep else 2)
    nth, request = server.requests[1]
    assert nth == (1 if keep else 0)
    assert request.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert request.endswith(b'\r\nContent-Length: 7\r\n\r\n{"a":1}')


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
async def test_a_chunked_body_is_what_was_sent_wherever_the_packets_end(
    chunks: list[bytes], cuts: list[int]
) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    places = [0, *sorted({min(cut, len(raw)) for cut in cuts}), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]
    async with running(answer(*pieces)) as (_, http):
        assert await ask(http) == (200, b"".join(chunks))


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"],
        [b"HTTP/1.1 200 O"],
        [b"I speak no HTTP\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * (300 << 10)],
    ],
)
async def test_half_an_answer_and_none_at_all_are_errors(pieces: list[bytes]) -> None:
    async with running(answer(*pieces, keep=False)) as (server, http):
        with pytest.raises(UpstreamError):
            await ask(http)
        assert len(server.requests) == 1, "a request that was answered, however badly, is not sent again"


async def test_a_pooled_socket_that_closes_before_any_byte_costs_one_more_try() -> None:
    async def script(nth: int, writer: Writer) -> bool:
        if nth == 0:
            writer.write(OK)
        return nth == 0

    async with running(script) as (server, http):
        for _ in range(3):
            assert (await ask(http))[0] == 200
    assert [nth for nth, _ in server.requests] == [0, 1, 0, 1, 0]


async def test_a_new_socket_that_closes_before_any_byte_is_an_error() -> None:
    async with running(answer(keep=False)) as (server, http):
        with pytest.raises(Lost):
            await ask(http)
    assert len(server.requests) == 1


async def test_idle_sockets_are_closed_by_us_first() -> None:
    async with running(answer(OK), keepalive_s=0.1) as (server, http):
        await ask(http)
        await until(lambda: server.departures > 0)
        await ask(http)
    assert [nth for nth, _ in server.requests] == [0, 0]


async def test_silence_is_limited_before_the_head_and_within_the_body() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhi"
    for pieces in ([], [head]):
        async with running(answer(*pieces, pause=10.0)) as (_, http):
            with pytest.raises(Silent):
                await ask(http, limit=0.1)


async def test_a_slow_trickle_is_not_silence() -> None:
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", *[b"x"] * 6]
    async with running(answer(*pieces, pause=0.1)) as (_, http):
        assert await ask(http, limit=0.5) == (200, b"xxxxxx")


async def test_a_reader_that_stops_stops_the_server() -> None:
    sent = 0

    async def script(nth: int, writer: Writer) -> bool:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * (64 << 10))
            await writer.drain()
            sent += 64 << 10
        return True

    total = 64 << 20
    async with running(script) as (_, http):
        got = await http.request("POST", "/", "", b"", 5.0)
        before = -1
        while sent != before:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert HIGH_WATER < sent < total // 2
        size = 0
        while data := await got.read(5.0):
            size += len(data)
        assert size == total


async def test_cancelling_and_closing_end_the_connection_at_once() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhi"

    async def script(nth: int, writer: Writer) -> bool:
        writer.write(head if len(server.requests) == 2 else b"")
        return True  # and wait for the next request, or the end

    async with running(script) as (server, http):
        waiting = asyncio.create_task(ask(http))
        await until(lambda: len(server.requests) > 0)
        waiting.cancel()
        await until(lambda: server.departures > 0)
        got = await http.request("POST", "/", "", b"", 5.0)
        got.close()
        await until(lambda: server.departures > 1)
        assert await got.read(5.0) == b"hi"
        with pytest.raises(Lost):
            await got.read(5.0)


async def test_many_at_once_use_as_many_sockets_and_then_share_them() -> None:
    async with running(answer(OK, pause=0.05)) as (server, http):
        for _ in range(2):
            assert await asyncio.gather(*(ask(http) for _ in range(20))) == [(200, b"hi")] * 20
        assert server.connections == 20


async def test_a_socket_may_serve_another_before_its_last_reader_has_run() -> None:
    """Whole answers in one packet put their sockets back into the pool at once."""
    async with running(answer(OK)) as (server, http):

        async def work() -> None:
            for _ in range(20):
                assert await ask(http) == (200, b"hi")

        async with asyncio.timeout(10):
            await asyncio.gather(*(work() for _ in range(20)))
    assert len(server.requests) == 400


async def test_nobody_there() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    with pytest.raises(Unreachable, match="refused"):
        await ask(UpstreamHttp(f"http://127.0.0.1:{port}", 1.0, 1.0))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with the openssl program")
async def test_certificates_are_verified(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with running(answer(OK), tls=context) as (server, http):
        with pytest.raises(Unreachable, match=r"certificate is not valid: self.signed certificate"):
            await ask(http)
        assert server.requests == []
    async with running(answer(OK), tls=context, ca_file=str(certificate)) as (server, http):
        for _ in range(2):
            assert await ask(http) == (200, b"hi")
        assert server.connections == 1
        http.host = "localhost"  # the certificate is for the address only
        http._idle.clear()
        with pytest.raises(Unreachable, match="certificate is not valid: Hostname mismatch"):
            await ask(http)
