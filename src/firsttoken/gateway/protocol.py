"""uvicorn's HTTP protocol with what it lacks: a cap on the size of a request's head, on the time it may take, and on
how long a client may leave its answer unread.

Without them one client can hold memory with an endless header, a connection with a byte per second, or an upstream's
slot by not reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from firsttoken.gateway.errors import error_body
from firsttoken.http_protocol import Together


def capped(
    max_head_bytes: int, head_seconds: float, unread_seconds: Callable[[], float]
) -> type[HttpToolsProtocol]:
    """The protocol class with these limits; `unread_seconds` may change while it runs."""
    limits = {"max_head_bytes": max_head_bytes, "head_seconds": head_seconds}
    return type("Capped", (CappedProtocol,), {**limits, "unread_seconds": staticmethod(unread_seconds)})


class CappedProtocol(HttpToolsProtocol):
    max_head_bytes: int
    head_seconds: float
    unread_seconds: Callable[[], float]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.head_bytes = 0
        self.head_timer: asyncio.TimerHandle | None = None
        self.unread_timer: asyncio.TimerHandle | None = None
        self.refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Together(transport, self.loop))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._read_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client's socket is full. If it stays so, the connection is cut, which the app sees as a departure."""
        super().pause_writing()
        self.unread_timer = self.loop.call_later(self.unread_seconds(), self.transport.abort)

    def resume_writing(self) -> None:
        self._read_on()
        super().resume_writing()

    def _read_on(self) -> None:
        if self.unread_timer is not None:
            self.unread_timer.cancel()
            self.unread_timer = None

    def data_received(self, data: bytes) -> None:
        if self.refused:
            return
        super().data_received(data)
        if self.head_timer is not None and not self.refused:  # the head is not complete yet
            self.head_bytes += len(data)
            if self.head_bytes > self.max_head_bytes:
                self._refuse(431, "The request's head is too large.", "head_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.head_timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.max_head_bytes:
            self._refuse(431, "The request's head is too large.", "head_too_large")
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.refused:
            super().on_message_complete()

    def _arm(self) -> None:
        self.head_bytes = 0
        self.head_timer = self.loop.call_later(self.head_seconds, self._late)

    def _disarm(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _late(self) -> None:
        self.head_timer = None
        if self.head_bytes:
            self._refuse(
                408, f"The request did not arrive within {self.head_seconds:g} s.", "request_timeout"
            )
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        self.refused = True
        self._disarm()
        if self.cycle is None or self.cycle.response_complete:  # else an earlier answer is still on its way
            body = error_body(status, message, code)
            head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
