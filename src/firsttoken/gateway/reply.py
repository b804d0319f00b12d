"""What a client gets: the answer's head, body or events, comments while it waits, and errors at any moment."""

from __future__ import annotations

import asyncio
from typing import Any

from firsttoken.gateway.accounts import Key
from firsttoken.gateway.asgi import Headers, Send, send_error
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.journal import Record
from firsttoken.gateway.limits import Limiter
from firsttoken.gateway.upstream_http import Answer

STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
FROM_UPSTREAM = (b"content-type", b"content-encoding", b"retry-after")
PING = b": ping\n\n"


class Reply:
    """The answer to one request, sent through ASGI's `send`."""

    def __init__(self, send: Send, record: Record, key: Key, limiter: Limiter):
        self._send, self.record, self.key, self.limiter = send, record, key, limiter
        self.started = False
        """The head was sent: an error can only be an event of the stream now."""
        self._prepared: Headers | None = None

    def prepare(self) -> None:
        """Makes the headers that are ours while there is time, before the upstream has answered."""
        self._prepared = self._own_headers()

    async def start(self, answer: Answer, length: int | None = None) -> None:
        """Sends the head: the upstream's type and timing, and what is ours. Without `length` it is a stream."""
        headers = self._prepared or self._own_headers()
        own = b"gateway;dur=%.3f" % (self.record.gateway_ms or 0.0)
        timing = answer.header(b"server-timing")
        headers.append((b"server-timing", own + b", " + timing if timing else own))
        for name in FROM_UPSTREAM:
            if (value := answer.header(name)) is not None:
                headers.append((name, value))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        elif answer.status == 200:
            headers += STREAM_HEADERS
        self.started = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def body(self, data: bytes, more: bool = True) -> None:
        """A piece of the answer. Waits for a client that reads slowly; the protocol ends one that has stopped."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def ping_until(self, future: asyncio.Future[Any], every: float) -> Any:
        """Waits for `future`; while it takes long, opens the stream and sends comments, so that proxies stay calm."""
        try:
            while not (await asyncio.wait((future,), timeout=every))[0]:
                if not self.started:
                    self.started = True
                    kind = (b"content-type", b"text/event-stream; charset=utf-8")
                    headers = [*self._own_headers(), kind, *STREAM_HEADERS]
                    await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                await self.body(PING)
            return future.result()
        finally:
            if not future.done():
                future.cancel()

    async def fail(self, error: ApiError, stream: bool, anthropic: bool) -> None:
        """Tells the client: as an answer if none has begun, else as an event of its stream."""
        if not self.started:
            self.started = True
            await send_error(self._send, error, self._own_headers())
        elif stream:
            await self.body(error.event(anthropic), more=False)
        # Else a body was cut short: returning without its end makes the server close the connection.

    def _own_headers(self) -> Headers:
        record = self.record
        headers: Headers = [
            (b"x-request-id", (record.client_id or record.id).encode("latin-1")),
            (b"x-gateway-request-id", record.id.encode()),
        ]
        if not self.key.limits:
            return headers
        left = self.limiter.remaining(self.key)
        for kind, name in (("rpm", b"requests"), ("tpm", b"tokens")):
            if kind in left:
                limit, remaining, reset = left[kind]
                headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
                headers.append((b"x-ratelimit-remaining-" + name, b"%d" % remaining))
                headers.append((b"x-ratelimit-reset-" + name, b"%.3fs" % reset))
        return headers
