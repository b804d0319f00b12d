"""How the mock server answers a request for text: it waits as programmed, and keeps account of what it did."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

from firsttoken.bench.mock_engine import Behaviour, Engine, Seen
from firsttoken.bench.mock_formats import (
    STREAMS,
    EventStream,
    error_answer,
    json_answer,
    prompt_words,
    server_timing,
    whole,
)

ANSWER = """the first token of a good answer comes early and then words follow in a steady stream while you
read them so that nobody waits for long and each line is there when the eye wants it"""


class Account:
    """What the mock has seen: a row per request, and how many ran at once."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.in_flight = self.max_in_flight = 0

    def add(self, request: web.Request, stream: bool, prompt_tokens: int) -> Seen:
        id = request.headers.get("X-Request-Id") or f"mock-{len(self.seen)}"
        key = request.headers.get("Authorization")
        self.seen.append(Seen(id=id, path=request.path, stream=stream, key=key, prompt_tokens=prompt_tokens))
        return self.seen[-1]

    def enter(self) -> None:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def clear(self) -> None:
        self.seen.clear()
        self.max_in_flight = self.in_flight

    def totals(self, detail: bool) -> dict[str, Any]:
        count = dict.fromkeys(("running", "ok", "disconnected", "died", "error"), 0)
        for row in self.seen:
            count[row.status] += 1
        totals = {
            "requests": len(self.seen),
            "by_status": count,
            "prompt_tokens": sum(row.prompt_tokens for row in self.seen),
            "completion_tokens": sum(row.completion_tokens for row in self.seen),
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
        }
        return totals | ({"detail": [row.__dict__ for row in self.seen]} if detail else {})


class Answers:
    """The handlers of the routes that generate."""

    def __init__(self, behaviour: Behaviour, engine: Engine, account: Account, model: str):
        self.behaviour, self.engine, self.account, self.model = behaviour, engine, account, model

    async def text(self, request: web.Request) -> web.StreamResponse:
        """Chat, text, messages and responses."""
        try:
            body = await request.json()
            words = prompt_words(body)
        except (ValueError, KeyError, TypeError) as error:
            return error_answer(400, f"The body is not a valid request: {error!r}", "invalid_request_error")
        how = self.behaviour.with_request(body.get("mock") or {})
        seen = self.account.add(request, bool(body.get("stream")), len(words))
        self.account.enter()
        try:
            if how.hang:
                await asyncio.Event().wait()
            if how.status != 200:
                seen.status = "error"
                headers = {"Retry-After": "1"} if how.status in (429, 503) else None
                return error_answer(how.status, "The mock was told to fail.", "server_error", headers=headers)
            return await self._answer(request, body, words, how, seen)
        except asyncio.CancelledError:
            seen.status = "disconnected"
            raise
        except ConnectionResetError:
            seen.status = "disconnected"
            return web.Response(
                status=499
            )  # nobody reads it; raised, it would be logged as this program's fault
        finally:
            self.account.in_flight -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], words: list[str], how: Behaviour, seen: Seen
    ) -> web.StreamResponse:
        draw = random.Random("\0".join(words))
        vocabulary = ANSWER.split()
        answer = [draw.choice(vocabulary) + " " for _ in range(_wanted(body, how))]
        arrived = time.perf_counter()
        stream = STREAMS[request.path](request, seen, self.model) if seen.stream else None
        pinger = await _before_the_first_token(stream, how) if stream else None
        timing: dict[str, float] = {}
        try:
            await self.engine.enter(len(words))
            try:
                due = await self._prefill(words, body.get("cache_salt"), how, seen, arrived, timing)
                if pinger:
                    pinger.cancel()
                ended = await self._decode(answer, due, draw, how, seen, stream, timing)
                if ended is not None:
                    return ended
            finally:
                self.engine.leave()
        finally:
            if pinger:
                pinger.cancel()
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": len(answer),
            "total_tokens": len(words) + len(answer),
            "prompt_tokens_details": {"cached_tokens": seen.cached_tokens},
            "timing": {f"{name}_ms": round(value, 3) for name, value in timing.items()},
        }
        seen.status = "ok"
        if stream:
            return await stream.close(usage, bool((body.get("stream_options") or {}).get("include_usage")))
        reply = whole(request.path, seen.id, self.model, "".join(answer), usage)
        return json_answer(reply, headers={"Server-Timing": server_timing(timing), "X-Request-Id": seen.id})

    async def _prefill(
        self,
        words: list[str],
        salt: str | None,
        how: Behaviour,
        seen: Seen,
        arrived: float,
        timing: dict[str, float],
    ) -> float:
        """Waits until the first token is due; returns when that was (perf_counter)."""
        scheduled = time.perf_counter()
        seen.cached_tokens = self.engine.match(words, salt)
        self.engine.counters["prompt"] += len(words)
        if how.prefill:
            async with self.engine.prefill_lock:
                await asyncio.sleep(how.prefill * (len(words) - seen.cached_tokens))
        due = scheduled + how.ttft if not how.prefill else time.perf_counter() + how.ttft
        await _sleep_until(due)
        timing["queue"] = (scheduled - arrived) * 1e3
        timing["prefill"] = (time.perf_counter() - scheduled) * 1e3
        return due

    async def _decode(
        self,
        answer: list[str],
        due: float,
        draw: random.Random,
        how: Behaviour,
        seen: Seen,
        stream: EventStream | None,
        timing: dict[str, float],
    ) -> web.StreamResponse | None:
        """Sends the tokens when they are due. The response if the stream was told to fail on the way."""
        counters = self.engine.counters
        per_chunk, sent, chunks = how.tokens_per_chunk, 0, 0
        if self.engine.settings["speculation"] == "always":
            per_chunk = max(per_chunk, 2)
        while sent < len(answer):
            count = 1 if sent == 0 else min(per_chunk, len(answer) - sent)
            if stream:
                if not stream.opened:
                    await stream.open(server_timing(timing))
                if chunks == how.die_after:
                    return stream.die()
                if chunks == how.error_after:
                    return await stream.fail()
                if not stream.role_sent:
                    await stream.role()
                await stream.content("".join(answer[sent : sent + count]))
            sent, chunks = sent + count, chunks + 1
            seen.completion_tokens = sent
            counters["generated"] += count
            if count > 1 and per_chunk > how.tokens_per_chunk:
                counters["drafts"] += 1
                counters["drafted"] += per_chunk
                counters["accepted"] += count - 1
            if sent < len(answer):
                due += how.itl * (1 + how.jitter * draw.uniform(-1, 1))
                await _sleep_until(due)
                timing.setdefault("first_decode", how.itl * 1e3)
        return None

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        tokens = sum(len(str(text).split()) for text in texts)
        self.account.add(request, stream=False, prompt_tokens=tokens).status = "ok"
        data = [{"object": "embedding", "index": i, "embedding": [0.0, 1.0]} for i in range(len(texts))]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json_answer({"object": "list", "model": self.model, "data": data, "usage": usage})


def _wanted(body: dict[str, Any], how: Behaviour) -> int:
    """Tokens to answer with."""
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    return int(next((body[name] for name in names if body.get(name)), how.tokens))


async def _before_the_first_token(stream: EventStream, how: Behaviour) -> asyncio.Task[None] | None:
    """What some servers send while there is no token yet. The task of the pings, if there are any."""
    if not (how.role_first or how.empty_first or how.ping):
        return None
    await stream.open()
    if how.role_first:
        await stream.role()
    if how.empty_first:
        await stream.content("")
    return asyncio.create_task(_ping(stream, how.ping)) if how.ping else None


async def _ping(stream: EventStream, every: float) -> None:
    with suppress(ConnectionResetError):
        while True:
            await asyncio.sleep(every)
            await stream.write(": ping\n\n")


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
