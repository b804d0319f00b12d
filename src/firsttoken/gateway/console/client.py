"""The gateway as the console sees it: its HTTP API, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp

from firsttoken.gateway.console.sessions import Session, Sessions

TIMEOUT_S = 10.0
"""For everything but chat: a page says that the gateway does not answer, rather than hang."""
FIRST_BYTE_S = 300.0
SILENCE_S = 120.0
MAX_LINE_BYTES = 8 << 20


class SignedOut(Exception):
    """The session has ended, or its key is no admin key any more."""


class Refused(Exception):
    """The gateway said no, or nothing at all; the message is fit for the page."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Answer:
    """A chat answer as it grows. Milliseconds are counted from the moment that the request was sent."""

    text: str = ""
    ttft_ms: float | None = None
    last_ms: float | None = None
    tokens: int = 0
    """The upstream's own count once it tells it at the end, until then pieces of text."""
    request_id: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token: (tokens − 1) / (time of the last − time of the first)."""
        if self.ttft_ms is None or self.last_ms is None or self.tokens < 2 or self.last_ms <= self.ttft_ms:
            return None
        return (self.tokens - 1) / (self.last_ms - self.ttft_ms) * 1e3


@dataclass(slots=True)
class Gateway:
    """One gateway, and the sockets to it."""

    url: str
    http: aiohttp.ClientSession = field(init=False)

    async def start(self) -> None:
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 20,
        )

    async def stop(self) -> None:
        await self.http.close()

    async def call(self, key: str, method: str, path: str, query: Mapping[str, Any], body: Any = None) -> Any:
        """The answer of `path`. Raises Refused with what the gateway says."""
        try:
            async with self.http.request(
                method,
                self.url + path,
                params={name: str(value) for name, value in query.items() if value not in (None, "")},
                json=body,
                headers={"Authorization": f"Bearer {key}"},
            ) as answer:
                if answer.content_type == "text/csv":
                    return await answer.text()
                content = await answer.json(content_type=None)
                if answer.status >= 400:
                    raise Refused(_message(content, answer.status), answer.status)
                return content
        except TimeoutError:
            raise Refused(f"the gateway has not answered for {TIMEOUT_S:.0f} s") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise Refused("the gateway can't be reached") from None

    async def chat(self, key: str, body: dict[str, Any]) -> AsyncIterator[Answer]:
        """Streams an answer: the same object again and again, with more in it. Raises Refused."""
        answer, started = Answer(), time.perf_counter()
        limits = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=FIRST_BYTE_S)
        try:
            async with self.http.post(
                f"{self.url}/v1/chat/completions",
                json=body | {"stream": True, "stream_options": {"include_usage": True}},
                headers={"Authorization": f"Bearer {key}"},
                timeout=limits,
            ) as response:
                answer.request_id = response.headers.get("X-Gateway-Request-Id")
                if response.status != 200:
                    raise Refused(_message(await response.json(content_type=None), response.status))
                async for event in _events(response.content):
                    if "error" in event:
                        raise Refused(_message(event, 200))
                    _take(answer, event, (time.perf_counter() - started) * 1e3)
                    yield answer
        except TimeoutError:
            raise Refused("the answer has been silent for too long") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise Refused("the connection to the gateway broke") from None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line until `[DONE]`."""
    async for line in content:
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _take(answer: Answer, event: dict[str, Any], now_ms: float) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            answer.text += text
            answer.tokens += 1
            answer.last_ms = now_ms
            if answer.ttft_ms is None:
                answer.ttft_ms = now_ms
    counted = (event.get("usage") or {}).get("completion_tokens")
    if counted:
        answer.tokens = counted


def _message(content: Any, status: int) -> str:
    try:
        return str(content["error"]["message"])
    except (TypeError, KeyError):
        return f"status {status}"


@dataclass(slots=True)
class Api:
    """The gateway, asked in the name of one session."""

    gateway: Gateway
    sessions: Sessions
    session: Session

    async def get(self, path: str, **query: Any) -> Any:
        """GET /admin/v1/PATH. What a page asks by itself does not keep a session alive."""
        return await self._call("GET", path, query)

    async def change(self, method: str, path: str, body: Any = None) -> Any:
        """POST, PATCH, PUT or DELETE /admin/v1/PATH: an act of the one who is signed in."""
        self._check()
        self.sessions.touch(self.session)
        return await self._call(method, path, {}, body)

    def chat(self, body: dict[str, Any]) -> AsyncIterator[Answer]:
        self._check()
        self.sessions.touch(self.session)
        return self.gateway.chat(self.session.key, body)

    async def _call(self, method: str, path: str, query: Mapping[str, Any], body: Any = None) -> Any:
        self._check()
        try:
            return await self.gateway.call(self.session.key, method, f"/admin/v1/{path}", query, body)
        except Refused as refusal:
            if refusal.status in (401, 403):
                self.sessions.end(self.session)
                raise SignedOut from None
            raise

    def _check(self) -> None:
        if not self.sessions.live(self.session):
            raise SignedOut


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")
