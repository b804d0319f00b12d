"""HTTP/1.1 for measuring: bytes are stamped in the socket's callback, and nothing else is done with them.

A general client reads, wakes a task, parses, and only then looks at the clock; with many streams on one event
loop that work is charged to the server. Here `data_received` takes the time first and keeps the bytes; events
are parsed when the trial is over. Proxies and redirects are left out: they would be measured too.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from firsttoken.engine.config import ConfigError

clock = time.perf_counter
"""The clock of every stamp: monotonic, in seconds, with an arbitrary origin."""


class Unreachable(ConfigError):
    """No HTTP answer could be had; the message is one line that says why."""


@dataclass(slots=True)
class Answer:
    """One response, as it came. All times are `clock()` stamps."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case; a repeated header is joined by commas."""
    connect: float = 0.0
    """Seconds spent on a new connection before the request could be sent; 0 on a kept one."""
    sent: float = 0.0
    first_byte: float | None = None
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """The body as it was received: (stamp, bytes), transfer encoding removed."""
    ended: float | None = None
    complete: bool = False
    """False: the connection was lost before the end of the body."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One socket, one request at a time. The parser calls the `on_…` methods inside `data_received`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer = Answer()
        self.done: asyncio.Future[None] | None = None
        self.now = 0.0
        self.lost = False
        self.keep = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases

    def start(self, head_and_body: bytes, connect: float) -> asyncio.Future[None]:
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self.answer = Answer(connect=connect)
        self.done = asyncio.get_running_loop().create_future()
        self.keep = False
        self.answer.sent = clock()
        self.transport.write(head_and_body)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.now = clock()
        if self.done is None or self.done.done():
            return
        if self.answer.first_byte is None:
            self.answer.first_byte = self.now
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Unreachable(f"the answer is not HTTP/1.1 ({error})"))

    def on_status(self, _: bytes) -> None:
        self.answer.status = self.parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self.answer.headers.get(key)
        self.answer.headers[key] = f"{known}, {text}" if known else text

    def on_headers_complete(self) -> None:
        self.answer.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answer.pieces.append((self.now, body))

    def on_message_complete(self) -> None:
        self.keep = self.parser.should_keep_alive()
        self.answer.complete = True
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self.now, self.lost, self.keep = clock(), True, False
        answer = self.answer
        # Without a length or chunks the close itself is the end of the body (HTTP/1.0 style).
        delimited = "content-length" in answer.headers or "transfer-encoding" in answer.headers
        answer.complete = answer.complete or (answer.status != 0 and not delimited and error is None)
        self._end()

    def _end(self, error: Exception | None = None) -> None:
        if self.done is None or self.done.done():
            return
        self.answer.ended = self.now
        if error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Http:
    """A client for one server, with kept connections. Use as `async with Http(url) as http`."""

    def __init__(self, base_url: str, timeout: float = 600.0):
        """`timeout`: seconds for a whole request, so that nothing hangs for ever."""
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unreachable(f"{base_url!r} is no http:// or https:// address")
        self.host = parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.root = parts.path.rstrip("/")
        self.base_url = f"{parts.scheme}://{parts.netloc}{self.root}"
        self.netloc = parts.netloc.rpartition("@")[2]
        self.timeout = timeout
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            if connection.transport:
                connection.transport.abort()
        self._idle.clear()

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """Sends one request, returns its whole answer. Raises Unreachable, also when the time limit passes.

        Cancelling the call closes the connection, which is how a client leaves.
        """
        fields = {"Host": self.netloc, "Accept-Encoding": "identity", "User-Agent": "firsttoken-bench"}
        if body:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        fields |= headers or {}
        head = f"{method} {self.root}{path} HTTP/1.1\r\n" + "".join(
            f"{k}: {v}\r\n" for k, v in fields.items()
        )
        message = head.encode("latin-1") + b"\r\n" + body
        try:
            async with asyncio.timeout(self.timeout):
                answer = await self._exchange(message)
        except TimeoutError:
            raise Unreachable(f"{self.base_url} gave no complete answer within {self.timeout:g} s") from None
        if answer.status == 0:
            raise Unreachable(f"{self.base_url} closed the connection without an answer")
        return answer

    async def _exchange(self, message: bytes) -> Answer:
        while True:
            kept = next((c for c in self._idle if not c.lost), None)
            if kept:
                self._idle.remove(kept)
            began = clock()
            connection = kept or await self._connect()
            try:
                await connection.start(message, 0.0 if kept else clock() - began)
            except BaseException:
                if connection.transport:
                    connection.transport.abort()
                raise
            if connection.keep:
                self._idle.append(connection)
            elif connection.transport:
                connection.transport.close()
            # A kept connection that the server closed while it was idle: send again on a fresh one.
            if kept and connection.answer.first_byte is None:
                continue
            return connection.answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.create_connection(_Connection, self.host, self.port, ssl=self.tls)
        except ssl.SSLError as error:
            raise Unreachable(f"{self.base_url}: TLS failed: {error.reason or error}") from None
        except ConnectionRefusedError:
            raise Unreachable(f"nothing listens at {self.host}:{self.port} (connection refused)") from None
        except OSError as error:
            raise Unreachable(f"cannot reach {self.host}:{self.port}: {error.strerror or error}") from None
        return protocol
