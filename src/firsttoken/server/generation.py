"""One request's answers as they grow: engine outputs in; text, counts and times out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from firsttoken.backends.base import Backend, BackendError
from firsttoken.engine.request import Request, RequestOutput, RequestTiming, TokenLogprobs
from firsttoken.server.detokenize import Detokenizer
from firsttoken.server.stop import StopStrings


@dataclass(slots=True)
class Delta:
    """What one engine step added to one answer, after stop strings."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    seconds: float | None = None
    """Since the answer's previous tokens, or for its first since the request's arrival; None: no tokens."""
    is_first: bool = False


class Choice:
    """One answer: its text, its tokens up to the end or to the stop string, and why it ended."""

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_stops", "drafts", "finish_reason", "first_seconds",
        "index", "last_output", "num_tokens", "only_prompt", "stop_reason",
    )  # fmt: skip

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool, min_tokens: int
    ) -> None:
        self.index = index
        self.first_seconds: float | None = None
        """From the request's arrival to this answer's first token."""
        self.last_output: float | None = None
        """`time.monotonic()` of the newest tokens."""
        self.num_tokens = 0
        """Tokens that count as the answer's: up to and with the one that completed a stop string."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        """The stop string or stop token id that ended the answer; None for EOS."""
        self.only_prompt = False
        """The answer is empty: only the prompt's scores were asked for."""
        self.drafts = (0, 0, 0)
        """Verified drafts, drafted tokens, accepted tokens."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens

    def add(self, output: RequestOutput) -> Delta:
        """Takes one engine output. A Delta with a finish_reason is the last; what comes later is dropped."""
        if output.finish_reason == "error":
            raise BackendError(output.error or "the engine failed on this request")
        if output.num_drafts:
            self.drafts = (output.num_drafts, output.num_draft_tokens, output.num_accepted_tokens)
        if self.only_prompt:
            self.finish_reason = "length"
            return Delta(finish_reason="length")
        delta = Delta(logprobs=output.logprobs or [])
        # The token that ended an answer is counted, but it is no part of its text.
        silent_end = output.finish_reason == "stop" and not self._include_stop and bool(output.token_ids)
        tokens = output.token_ids[:-1] if silent_end else output.token_ids
        if self._stops is None:
            delta.text = self._detokenizer.push(tokens)
            delta.token_ids = output.token_ids
            self.num_tokens += len(output.token_ids)
        else:
            self._add_until_stop(self._stops, output.token_ids, tokens, delta)
        if self.finish_reason is None and output.finish_reason is not None:
            self._finish(output, delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _add_until_stop(
        self, stops: StopStrings, all_ids: list[int], tokens: list[int], delta: Delta
    ) -> None:
        """Token by token, so that one step's tokens after the match count for nothing."""
        texts = []
        for i, token_id in enumerate(tokens):
            text = self._detokenizer.push((token_id,))
            self.num_tokens += 1
            if self.num_tokens <= self._min_tokens:
                texts.append(text)
                continue
            texts.append(stops.push(text))
            if stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", stops.matched
                delta.token_ids = all_ids[: i + 1]
                delta.logprobs = delta.logprobs[: i + 1]
                break
        else:
            self.num_tokens += len(all_ids) - len(tokens)
            delta.token_ids = all_ids
        delta.text = "".join(texts)

    def _finish(self, output: RequestOutput, delta: Delta) -> None:
        rest = self._detokenizer.finish()
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self._stops is not None:
            rest = self._stops.push(rest)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
            rest += self._stops.finish()
        delta.text += rest


@dataclass(slots=True)
class Times:
    """Where the time to the first token went, in seconds; the server's part and the engine's."""

    arrival: float
    """`time.monotonic()` when the request's headers had been read."""
    template: float = 0.0
    tokenize: float = 0.0
    engine: RequestTiming = field(default_factory=RequestTiming)
    first_token: float | None = None
    """From arrival to the engine's first token in this process."""

    def parts(self) -> dict[str, float]:
        """Name → seconds of every part that is known by now, in order."""
        parts = {"template": self.template, "tokenize": self.tokenize}
        for name in ("queue", "prefill", "first_decode"):
            seconds = getattr(self.engine, name)
            if seconds is not None:
                parts[name] = seconds
        if self.first_token is not None:
            parts["first_token"] = self.first_token
        return parts

    def header(self) -> tuple[bytes, bytes]:
        """Server-Timing (W3C), durations in milliseconds."""
        value = ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in self.parts().items())
        return b"server-timing", value.encode()

    def milliseconds(self) -> dict[str, float]:
        return {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in self.parts().items()}


@dataclass(slots=True)
class Answers:
    """All answers to one HTTP request: choices, in order of index, and what was learned about the prompts."""

    requests: list[Request]
    choices: list[Choice]
    times: Times
    prompt_tokens: int
    """Each prompt counted once, however many choices it has."""
    choices_per_prompt: int = 1
    cached_tokens: int = 0
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    """By index of the choice, where asked for."""

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    async def outputs(self, backend: Backend) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """Deltas as the engine makes them, until every choice is finished.

        Closing this early, or leaving it by an exception, aborts what is still running.
        """
        left = len(self.choices)
        async with aclosing(_merged(backend, self.requests)) as merged:
            async for i, output in merged:
                choice = self.choices[i]
                if choice.finish_reason is not None:
                    continue
                self._note(i, output)
                delta = choice.add(output)
                if output.token_ids:
                    self._time(choice, delta)
                if delta.finish_reason is not None:
                    left -= 1
                    if left and not output.finished:
                        await backend.abort(self.requests[i].request_id)
                    elif not left:
                        await merged.aclose()  # before the client is written to: its blocks are free at once
                yield choice, delta
                if not left:
                    return
        if left:
            raise BackendError("the engine ended the request without a reason")

    def _note(self, i: int, output: RequestOutput) -> None:
        times = self.times
        if output.timing is not None and (i == 0 or times.engine.queue is None):
            times.engine = output.timing
        if output.num_cached_tokens is not None and i % self.choices_per_prompt == 0:
            self.cached_tokens += output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[i] = output.prompt_logprobs

    def _time(self, choice: Choice, delta: Delta) -> None:
        now = time.monotonic()
        delta.is_first = choice.last_output is None
        delta.seconds = now - (self.times.arrival if choice.last_output is None else choice.last_output)
        choice.last_output = now
        if delta.is_first:
            choice.first_seconds = delta.seconds
        if self.times.first_token is None:
            self.times.first_token = delta.seconds

    def usage(self, final: bool = True) -> dict[str, Any]:
        """The OpenAI usage object. Final ones have one extension: `timing`, in ms."""
        completion = sum(choice.num_tokens for choice in self.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if final:
            usage["timing"] = self.times.milliseconds()
            drafts, drafted, accepted = map(sum, zip(*(c.drafts for c in self.choices), strict=True))
            if drafts:
                usage["speculation"] = {
                    "drafts": drafts,
                    "drafted_tokens": drafted,
                    "accepted_tokens": accepted,
                }
        return usage


async def _merged(
    backend: Backend, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come. One alone needs no task or queue between it and the engine."""
    if len(requests) == 1:
        async with aclosing(_closable(backend.generate(requests[0]))) as stream:
            async for output in stream:
                yield 0, output
        return
    # Bounded by the tokens that the requests may make.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def pump(i: int, request: Request) -> None:
        try:
            async with aclosing(_closable(backend.generate(request))) as stream:
                async for output in stream:
                    queue.put_nowait((i, output))
            queue.put_nowait((i, None))
        except BackendError as error:
            queue.put_nowait((i, error))

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            i, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _closable(stream: AsyncIterator[RequestOutput]) -> AsyncGenerator[RequestOutput, None]:
    assert hasattr(stream, "aclose"), "Backend.generate must return an async generator: closing it aborts"
    return stream  # type: ignore[return-value]
