"""The HTTP/1.1 client towards upstreams: pooled connections, and nothing between the socket and the relay.

A general client builds an object for each URL, header, timer and trace, which costs a relay more than everything
else that it does. This one knows one server, writes a request in one go, and hands on the bytes of the answer as they
come. It keeps what a relay needs and general clients get wrong for it:

- an idle connection is closed before the upstream closes it (`keepalive_s`), and a request that met one which the
  upstream closed all the same, before any byte, is sent once more on a new one, whatever its method;
- there is no limit on the whole of an answer, only on silence;
- a reader that doesn't read stops the socket from being read (`HIGH_WATER`);
- an answer that is not read to its end takes its connection with it, so the upstream sees the cancellation at once.

Certificates are verified. Redirects are not followed and proxies not used: an upstream is where its address says.
There is no limit on connections here: the relay admits no more streams than `max_streams`, and each has its own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import cast
from urllib.parse import urlsplit

import httptools

HIGH_WATER = 256 << 10
"""Bytes of an answer that wait for their reader before the socket is no longer read."""
MAX_HEAD = 256 << 10
"""Bytes of an answer's head; one that sends more is no HTTP server."""


class UpstreamError(Exception):
    """No answer, or not the whole of it; the message is fit for clients and names no address."""


class Unreachable(UpstreamError):
    """No connection could be made."""


class Lost(UpstreamError):
    """The connection ended before the answer did."""


class Silent(UpstreamError):
    """Nothing came for as long as was allowed."""


class Answer:
    """One response: its head, and the body as it comes."""

    __slots__ = ("_connection", "_headers", "_pieces", "_size", "complete", "error", "status")

    def __init__(self, connection: _Connection):
        self._connection = connection
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self.status = 0
        """0 until the head is there."""
        self.complete = False
        """The last byte of the body is here (though perhaps not read yet)."""
        self.error: UpstreamError | None = None

    def header(self, name: bytes) -> bytes | None:
        """A header's value; `name` in lower case."""
        return self._headers.get(name)

    @property
    def content_type(self) -> bytes:
        """The media type, without parameters, in lower case."""
        return self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    async def read(self, silence_s: float) -> bytes:
        """What has come since the last call, or the next that comes; b"" at the end.

        Raises Lost, or Silent after `silence_s` seconds without a byte.
        """
        while not self._pieces:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self._connection.wait(self._connection.loop.time() + silence_s)
        pieces, self._pieces, self._size = self._pieces, [], 0
        if not self.complete:  # else the connection may serve another by now
            self._connection.read_on()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Ends the exchange: an answer that is not complete takes the connection with it."""
        if not self.complete:
            self.error = self.error or Lost("it was cancelled")
            self._connection.abort()


class UpstreamHttp:
    """The connections to one server. Use it on one event loop."""

    def __init__(self, root: str, connect_s: float, keepalive_s: float, ca_file: str | None = None):
        """root: http(s)://HOST[:PORT][/PREFIX]. ca_file: certificates to trust beside the system's."""
        parts = urlsplit(root)
        self.host = parts.hostname or ""
        self.tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self.tls = ssl.create_default_context()
            if ca_file:
                self.tls.load_verify_locations(ca_file)
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/")
        self.connect_s, self.keepalive_s = connect_s, keepalive_s
        self._host_line = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        self._idle: deque[tuple[float, _Connection]] = deque()
        """(since when, connection), the longest idle first."""
        self._all: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- requests

    async def request(
        self, method: str, path: str, headers: str, body: bytes | None, first_byte_s: float
    ) -> Answer:
        """Sends one request and returns its answer when the head is there.

        headers: whole lines, each with its CR LF. Raises Unreachable, Lost, or Silent after `first_byte_s` seconds.
        Cancelling it closes the connection.
        """
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        head = f"{method} {self.prefix}{path}{self._host_line}{headers}{length}\r\n".encode("latin-1")
        message = head if body is None else head + body
        until = asyncio.get_running_loop().time() + first_byte_s
        connection = self._pooled()
        if connection is not None:
            answer = await connection.ask(message, until)
            if answer is not None:
                return answer
        # None there, or it was closed just now and before any byte: nobody has seen the request.
        connection = await self._connect()
        answer = await connection.ask(message, until)
        if answer is None:
            raise Lost("it closed the connection without an answer")
        return answer

    async def get(self, path: str, headers: str, limit_s: float) -> tuple[int, bytes]:
        """(status, body) of a small answer."""
        answer = await self.request("GET", path, headers, None, limit_s)
        body = b""
        try:
            while data := await answer.read(limit_s):
                body += data
        finally:
            answer.close()
        return answer.status, body

    def close(self) -> None:
        """Ends all connections, also those that are in use."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()

    # ---------------------------------------------------------------- the pool

    def _pooled(self) -> _Connection | None:
        """The connection that was used last, if it isn't too old."""
        oldest = asyncio.get_running_loop().time() - self.keepalive_s
        while self._idle:
            since, connection = self._idle.pop()
            if since >= oldest and connection.open:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self.tls
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self.connect_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise Unreachable(f"its certificate is not valid: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise Unreachable(f"TLS failed: {error.reason or 'no reason given'}") from None
        except ConnectionRefusedError:
            raise Unreachable("connection refused") from None
        except OSError as error:
            raise Unreachable(error.strerror or type(error).__name__) from None
        return connection

    def opened(self, connection: _Connection) -> None:
        self._all.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)

    def give_back(self, connection: _Connection) -> None:
        """A connection whose answer is complete; it may be used again."""
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._sweeper is None:
            self._sweeper = loop.call_later(self.keepalive_s, self._sweep)

    def _sweep(self) -> None:
        """Closes what has idled too long, and comes back when the next one will have."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self.keepalive_s
        while self._idle and (self._idle[0][0] <= oldest or not self._idle[0][1].open):
            self._idle.popleft()[1].abort()
        self._sweeper = None
        if self._idle:
            self._sweeper = loop.call_at(self._idle[0][0] + self.keepalive_s, self._sweep)


class _Connection(asyncio.Protocol):
    """One socket, one request at a time. The parser calls the `on_…` methods inside `data_received`."""

    def __init__(self, pool: UpstreamHttp):
        self.pool = pool
        self.loop = asyncio.get_running_loop()
        self.answer: Answer | None = None
        self.open = False
        self.head_bytes = 0
        self.paused = False
        self.waiter: asyncio.Future[None] | None = None
        self.due = 0.0
        """When the waiter has waited too long; `timer` fires at or before it."""
        self.timer: asyncio.TimerHandle | None = None
        self.timer_at = 0.0

    # ---------------------------------------------------------------- for the request and its answer

    async def ask(self, message: bytes, until: float) -> Answer | None:
        """Sends a request; its answer once the head is there, or None if the socket closed before any byte."""
        self.parser = httptools.HttpResponseParser(self)
        self.head_bytes = 0
        answer = self.answer = Answer(self)
        try:
            self.transport.write(message)
            # By the answer, not the connection: when it came in one packet, the connection may have its next request
            # before this task has run.
            while not answer.status:
                if answer.error is not None:
                    if self.head_bytes == 0 and isinstance(answer.error, Lost):
                        return None
                    raise answer.error
                await self.wait(until)
        except BaseException:
            answer.close()
            raise
        return answer

    async def wait(self, until: float) -> None:
        """Waits for anything to happen. Raises Silent at the time `until` of the event loop."""
        waiter = self.waiter = self.loop.create_future()
        # One timer serves many waits: it is moved only to fire earlier, and looks at `due` when it does.
        self.due = until
        if self.timer is None or self.timer_at > until:
            if self.timer is not None:
                self.timer.cancel()
            self._set_timer(until)
        await waiter

    def _set_timer(self, at: float) -> None:
        self.timer_at = at
        self.timer = self.loop.call_at(at, self._look)

    def _look(self) -> None:
        self.timer = None
        waiter = self.waiter
        if waiter is None or waiter.done():
            return
        if self.loop.time() < self.due:
            self._set_timer(self.due)
        else:
            waiter.set_exception(Silent("it is silent"))

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def read_on(self) -> None:
        if self.paused:
            self.paused = False
            if self.open:
                self.transport.resume_reading()

    def abort(self) -> None:
        self.open = False
        self.transport.abort()

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.open = True
        self.pool.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self.pool.lost(self)
        if self.timer is not None:
            self.timer.cancel()
        answer = self.answer
        if answer is None or answer.complete:
            return
        # Without a length or chunks the close itself is the end of the body.
        delimited = b"content-length" in answer._headers or b"transfer-encoding" in answer._headers
        if answer.status and not delimited and error is None and answer.error is None:
            answer.complete = True
        elif answer.error is None:
            answer.error = Lost("it closed the connection")
        self._wake()

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or answer.complete:
            self.abort()  # bytes that nobody asked for
            return
        if not answer.status:
            self.head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.error = answer.error or UpstreamError(f"its answer is not HTTP/1.1: {error}")
            self.abort()
        if not answer.status and self.head_bytes > MAX_HEAD:
            answer.error = UpstreamError("the head of its answer is too large")
            self.abort()
        if answer._size > HIGH_WATER and not self.paused and not answer.complete:
            self.paused = True
            self.transport.pause_reading()
        self._wake()

    # ---------------------------------------------------------------- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        headers, name = cast(Answer, self.answer)._headers, name.lower()
        headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        answer = cast(Answer, self.answer)
        status = self.parser.get_status_code()
        if status < 200:
            answer._headers.clear()  # an interim answer: the real one follows
        else:
            answer.status = status

    def on_body(self, data: bytes) -> None:
        answer = cast(Answer, self.answer)
        answer._pieces.append(data)
        answer._size += len(data)

    def on_message_complete(self) -> None:
        answer = cast(Answer, self.answer)
        if not answer.status or answer.complete:
            return
        answer.complete = True
        self.answer = None
        if self.parser.should_keep_alive() and self.open:
            self.read_on()
            self.pool.give_back(self)
        else:
            self.transport.close()
