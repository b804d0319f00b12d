"""The little of HTTP that the routes need, straight on ASGI: no middleware between engine and socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from firsttoken.server.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = b"application/json"

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Disconnected(Exception):
    """The client has gone: nobody is left to answer."""


class Connection:
    """One request and its response. `arrival` is `time.monotonic()` at which its headers were read."""

    __slots__ = ("_receive", "_send", "arrival", "path", "request_id", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: str, request_id: str) -> None:
        self.arrival = time.monotonic()
        self.scope = scope
        self.path = path
        self.request_id = request_id
        self.started = False
        """Whether a status line has been sent: after that, errors can only be events in the stream."""
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises ApiError 413 above `limit` bytes, Disconnected if it never ends."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body: bytes = message["body"]
            if len(body) > limit:
                raise _too_large(limit)
            return body
        parts = []
        size = 0
        while True:
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message["body"])
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body"):
                return b"".join(parts)
            message = await self._receive()

    @asynccontextmanager
    async def abort_on_disconnect(self) -> AsyncIterator[None]:
        """Cancels the block when the client leaves, wherever it waits, and then raises Disconnected.

        To be entered when the request's body has been read: what arrives after it can only be the end.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            # A cancellation from elsewhere (the server's shutdown) must stay one.
            if gone and task.uncancel() == 0:
                raise Disconnected from None
            raise
        finally:
            watcher.cancel()

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (b"content-type", content_type),
                    (b"content-length", b"%d" % len(body)),
                    (b"x-request-id", self.request_id.encode("latin-1")),
                    *headers,
                ],
            }
        )
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: Headers = ()) -> None:
        """Status and headers of an event stream; they leave together with the first event that follows."""
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    *_STREAM_HEADERS,
                    (b"x-request-id", self.request_id.encode("latin-1")),
                    *headers,
                ],
            }
        )

    async def write(self, data: bytes, more: bool = True) -> None:
        """Sends events. Waits while the client reads too slowly: what is buffered per stream stays bounded."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit / 2**20:g} MiB (--max-body-mib).",
        code="request_too_large",
        headers=[(b"connection", b"close")],
    )
