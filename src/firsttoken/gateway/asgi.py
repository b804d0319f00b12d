"""ASGI as the gateway uses it: the types, a request's body with its limits, an error as an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from firsttoken.gateway.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


async def read_body(receive: Receive, limit: int, seconds: float) -> bytes | None:
    """The whole request body; None if the client left. ApiError 413 and 408."""
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body: bytes = message.get("body", b"")
            if not message.get("more_body") and len(body) <= limit:
                return body
            parts = [body]
            size = len(body)
            while True:
                if size > limit:
                    raise ApiError(413, f"The request body is larger than {limit} bytes.", "body_too_large")
                if not message.get("more_body"):
                    return b"".join(parts)
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
    except TimeoutError:
        raise ApiError(408, f"The request did not arrive within {seconds:g} s.", "request_timeout") from None


async def send_error(send: Send, error: ApiError, headers: Headers | None = None) -> None:
    body = error.body()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (408, 413):
        own.append((b"connection", b"close"))  # the rest of the body is not read
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [*own, *error.headers, *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None
