"""The measuring client: one streamed request to any OpenAI-compatible server becomes one `Record`.

Definitions are those of `firsttoken.bench.metrics`. A record keeps every chunk with its own stamp, because
means hide stalls; what a server did not say is None, never 0; a 200 that carries an error event is a failure.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from firsttoken.bench.metrics import percentile
from firsttoken.bench.stamped_http import Answer, Http, Unreachable, clock
from firsttoken.engine.config import ConfigError

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Call:
    """What to ask. `extra` goes into the body as it is (ignore_eos, cache_salt, …)."""

    messages: list[dict[str, str]]
    max_tokens: int
    name: str = ""
    """Which prompt this is; the same name in another trial is the same text."""
    category: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Record:
    """One request, as the client saw it. Times in seconds; `intended`, `sent` count from the trial's start,
    everything else from `sent`."""

    name: str = ""
    category: str = ""
    intended: float = 0.0
    """When it should have been sent. Later is the client's fault, and the user's wait all the same."""
    sent: float = 0.0
    connect: float = 0.0
    first_byte: float | None = None
    chunks: list[tuple[float, str]] = field(default_factory=list)
    """(time, text) of every chunk with a non-empty token, visible or reasoning."""
    first_visible: float | None = None
    ended: float | None = None
    status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    server: dict[str, float] = field(default_factory=dict)
    """Where the server says the time went, in seconds by name: queue, prefill, first_decode, …"""
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.chunks)


@dataclass(slots=True)
class Reply:
    """A finished request whose bytes nobody has looked at yet."""

    record: Record
    answer: Answer | None

    def read(self) -> Record:
        if self.answer is not None:
            read_answer(self.answer, self.record)
            self.answer = None
        return self.record


class Client:
    """Sends calls to one model of one server and reads its side routes."""

    def __init__(self, http: Http, model: str, api_key: str | None = None):
        self.http, self.model = http, model
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.origin = clock()
        """Stamp from which `intended` and `sent` count; a trial sets it at its start."""

    async def send(self, call: Call, intended: float | None = None) -> Reply:
        """Sends one streamed chat completion and keeps its bytes unread: parse when no stream is in flight.

        intended: `clock()` stamp at which the request was due (None: now). Never raises for what the server
        or the network does wrong: that is `Record.error`."""
        due = clock() if intended is None else intended
        body = {
            "model": self.model,
            "messages": call.messages,
            "max_tokens": call.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **call.extra,
        }
        record = Record(name=call.name, category=call.category, intended=due - self.origin)
        try:
            answer = await self.http.request(
                "POST", "/v1/chat/completions", json.dumps(body).encode(), self.headers
            )
        except Unreachable as error:
            record.sent, record.error = record.intended, str(error)
            return Reply(record, None)
        record.sent = answer.sent - self.origin
        return Reply(record, answer)

    async def stream(self, call: Call) -> Record:
        """`send` and read at once: for a request that is alone."""
        return (await self.send(call)).read()

    async def get_json(self, path: str) -> Any:
        return await self._json("GET", path)

    async def post_json(self, path: str, data: Any = None) -> Any:
        return await self._json("POST", path, json.dumps({} if data is None else data).encode())

    async def get_text(self, path: str) -> str:
        answer = await self.http.request("GET", path, headers=self.headers)
        if answer.status != 200:
            raise Refused(answer.status, f"GET {path}: {describe_failure(answer)}")
        return answer.body.decode("utf-8", "replace")

    async def _json(self, method: str, path: str, body: bytes = b"") -> Any:
        answer = await self.http.request(method, path, body, self.headers)
        if answer.status != 200:
            raise Refused(answer.status, f"{method} {path}: {describe_failure(answer)}")
        try:
            return json.loads(answer.body or b"null")
        except ValueError:
            raise Refused(200, f"{method} {path}: the answer is not JSON") from None


class Refused(ConfigError):
    """A side route answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


# -------------------------------------------------------------------- reading an answer


def read_answer(answer: Answer, record: Record) -> None:
    """Fills `record` from the raw answer of a streamed chat (or text) completion."""
    record.status, record.connect = answer.status, answer.connect
    since = answer.sent
    record.first_byte = None if answer.first_byte is None else answer.first_byte - since
    record.ended = None if answer.ended is None else answer.ended - since
    record.server = server_timing(answer.headers.get("server-timing", ""))
    if answer.status != 200:
        record.error = describe_failure(answer)
        return
    if "text/event-stream" not in answer.headers.get("content-type", ""):
        record.error = "the answer is not an event stream; is this an OpenAI-compatible server?"
        return
    done = False
    for stamp, data in sse_events(answer.pieces):
        if data == "[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            record.error = f"an event is not JSON: {data[:80]!r}"
            return
        if event.get("error"):
            record.error = f"error event inside a 200 answer: {error_message(event)}"
            continue
        _read_event(event, stamp - since, record)
    if record.error is None and not (answer.complete and done):
        record.error = "the stream ended without [DONE]: the server or the connection died"
    if record.error is None and not record.chunks:
        record.error = "the answer holds no token"


def _read_event(event: dict[str, Any], at: float, record: Record) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        visible = delta.get("content") or choice.get("text") or ""
        hidden = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if visible or hidden:
            record.chunks.append((at, hidden + visible))
        if visible and record.first_visible is None:
            record.first_visible = at
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    usage = event.get("usage")
    if usage:  # some servers send it with every chunk: the last one counts
        record.prompt_tokens = usage.get("prompt_tokens")
        record.completion_tokens = usage.get("completion_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        _read_server_extras(usage, record)


def _read_server_extras(usage: dict[str, Any], record: Record) -> None:
    """What firsttoken's own server adds to the final usage: `timing` in ms, and `speculation` in tokens."""
    for name, value in (usage.get("timing") or {}).items():
        if name.endswith("_ms") and value is not None:
            record.server[name.removesuffix("_ms")] = value / 1e3
    speculation = usage.get("speculation") or {}
    record.drafts = speculation.get("drafts")
    record.drafted = speculation.get("drafted_tokens")
    record.accepted = speculation.get("accepted_tokens")


def sse_events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """(stamp, data) of each server-sent event. Its time is that of the piece that completed it."""
    buffer, data = b"", []
    stamp = 0.0
    for stamp, piece in pieces:
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield stamp, "\n".join(data)
                data = []
    if buffer.startswith(b"data:"):
        data.append(buffer[5:].strip().decode("utf-8", "replace"))
    if data:  # the last event without its blank line
        yield stamp, "\n".join(data)


def server_timing(header: str) -> dict[str, float]:
    """`queue;dur=0.1, prefill;dur=35` (ms, RFC draft Server-Timing) → seconds by name."""
    found = re.findall(r"([A-Za-z_][\w-]*)[^,]*?;\s*dur=([0-9.]+)", header)
    return {name.replace("-", "_"): float(value) / 1e3 for name, value in found}


def error_message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or (body.get("detail") if isinstance(body, dict) else None) or body)


def describe_failure(answer: Answer) -> str:
    """One line about an answer that is not 200."""
    try:
        message = error_message(json.loads(answer.body))
    except ValueError:
        message = answer.body.decode("utf-8", "replace").strip().partition("\n")[0][:200]
    location = answer.headers.get("location")
    if location:
        message = f"redirects to {location}; use that address"
    return f"HTTP {answer.status}" + (f": {message}" if message else "")


# -------------------------------------------------------------------- the client's own health


@dataclass(slots=True, kw_only=True)
class ClientHealth:
    """Whether the measuring client itself was in the way. Seconds; None where nothing was sampled."""

    lag_p50: float | None = None
    lag_p99: float | None = None
    """How much later than asked the client's event loop woke up."""
    lag_max: float | None = None
    dispatch_p99: float | None = None
    """Sent − intended."""
    cpu_share: float | None = None
    """Share of one core that the client's thread used."""

    LAG_FLOOR = 0.005
    """Timers of event loops tick in ms and a busy machine adds a few: below this a lag says nothing."""

    def verdict(self, ttft: float | None) -> str | None:
        """None if the figures can be trusted, else why not. ttft: the trial's median, in seconds."""
        limit = max(ClientHealth.LAG_FLOOR, 0.1 * (ttft or 0.0))
        if self.lag_p99 is not None and self.lag_p99 > limit:
            return (
                f"the client is the bottleneck: its event loop was {self.lag_p99 * 1e3:.1f} ms late (p99),"
                f" above {limit * 1e3:.1f} ms"
            )
        if self.dispatch_p99 is not None and self.dispatch_p99 > limit:
            return (
                f"the client is the bottleneck: it sent requests {self.dispatch_p99 * 1e3:.1f} ms late (p99),"
                f" above {limit * 1e3:.1f} ms"
            )
        if self.cpu_share is not None and self.cpu_share > 0.85:
            return f"the client is the bottleneck: it used {self.cpu_share:.0%} of a core"
        return None


@asynccontextmanager
async def watch_client(every: float = 0.01) -> AsyncIterator[ClientHealth]:
    """Measures the event loop's lag and the thread's CPU use; the yielded object is filled on exit."""
    health, lags = ClientHealth(), []

    async def sample() -> None:
        while True:
            due = clock() + every
            await asyncio.sleep(every)
            lags.append(max(0.0, clock() - due))

    began, cpu = clock(), time.thread_time()
    task = asyncio.create_task(sample())
    try:
        yield health
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        wall = clock() - began
        health.cpu_share = (time.thread_time() - cpu) / wall if wall > 0 else None
        health.lag_p50, health.lag_p99 = percentile(lags, 50), percentile(lags, 99)
        health.lag_max = max(lags, default=None)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a benchmark's coroutine on the fastest event loop there is; Ctrl-C cancels it in good order."""
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
