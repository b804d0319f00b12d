"""An engine without a model behind the Backend protocol: says what it is told to, when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from firsttoken.backends.base import BackendError, BackendInfo, EngineStats
from firsttoken.engine.config import ConfigError
from firsttoken.engine.request import FinishReason, Request, RequestOutput, RequestTiming, TokenLogprobs


@dataclass
class ScriptedBackend:
    """Answers every request with `answer(request)`, a whole list of token ids, and then EOS.

    Steps of `per_step` tokens, `first` seconds before the first and `gap` seconds before each other. It keeps
    the rules of an engine: max_tokens, stop ids, EOS, aborts, and errors when it dies.
    """

    answer: Callable[[Request], list[int]]
    eos: int
    vocab_size: int
    max_model_len: int = 4096
    per_step: int = 1
    first: float = 0.0
    gap: float = 0.0
    start_seconds: float = 0.0
    start_error: Exception | None = None

    requests: list[Request] = field(default_factory=list)
    """Every request, in order of arrival."""
    live: dict[str, asyncio.Event] = field(default_factory=dict)
    """Running requests by id; the event ends the wait of one that is aborted."""
    aborted: list[str] = field(default_factory=list)
    stopped: bool = False
    """While set, no step is made: requests are silent."""
    dead: str | None = None

    def __post_init__(self) -> None:
        self._up = False
        self._stats = EngineStats(num_blocks_total=100)
        self._death: asyncio.Event | None = None
        self.info = BackendInfo(
            model="scripted",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=[self.eos],
            device="cpu",
            dtype="float32",
            num_kv_blocks=100,
            block_size=16,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            settings={"max_num_seqs": 64, "speculation": "off"},
            startup={"load": 0.0},
        )

    async def start(self) -> None:
        await asyncio.sleep(self.start_seconds)
        if self.start_error is not None:
            raise self.start_error
        self._death = asyncio.Event()
        self._up = True

    async def close(self) -> None:
        if self._up:
            self.die("the engine was closed")

    @property
    def healthy(self) -> bool:
        return self._up and self.dead is None

    def die(self, reason: str = "the engine died") -> None:
        self.dead = reason
        assert self._death is not None
        self._death.set()

    def revive(self) -> None:
        self.dead = None
        self._death = asyncio.Event()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        if self.dead is not None:
            raise BackendError(self.dead)
        self.requests.append(request)
        abort = self.live[request.request_id] = asyncio.Event()
        finished = False
        self._stats.prompt_tokens += len(request.prompt_token_ids)
        try:
            async for output in self._outputs(request, abort):
                finished = output.finished
                yield output
        finally:
            del self.live[request.request_id]
            if not finished:
                self.aborted.append(request.request_id)

    async def _outputs(self, request: Request, abort: asyncio.Event) -> AsyncGenerator[RequestOutput, None]:
        sampling = request.sampling
        tokens, reason, stop = self._whole(request)
        position = 0
        while True:
            await self._pause(self.gap if position else self.first, abort)
            if abort.is_set():
                yield RequestOutput(request_id=request.request_id, finish_reason="abort")
                return
            step = tokens[position : position + (self.per_step if position else 1)]
            position += len(step)
            self._stats.generation_tokens += len(step)
            output = RequestOutput(request_id=request.request_id, token_ids=step)
            if sampling.logprobs is not None:
                output.logprobs = [self._logprobs(token, sampling.logprobs) for token in step]
            if position == len(step):
                output.num_cached_tokens = 0
                output.timing = RequestTiming(queue=0.001, prefill=0.002)
                if sampling.prompt_logprobs is not None:
                    prompt = request.prompt_token_ids
                    rest = [self._logprobs(token, sampling.prompt_logprobs) for token in prompt[1:]]
                    output.prompt_logprobs = [None, *rest]
            if position == len(tokens):
                output.finish_reason, output.stop_reason = reason, stop
                output.timing = RequestTiming(queue=0.001, prefill=0.002, first_decode=0.003)
            yield output
            if output.finished:
                return

    def _whole(self, request: Request) -> tuple[list[int], FinishReason, int | None]:
        """All tokens of the answer, why it ends, and by which stop id."""
        sampling = request.sampling
        tokens: list[int] = []
        for token in [*self.answer(request), self.eos]:
            tokens.append(token)
            if len(tokens) > sampling.min_tokens:
                if token in sampling.stop_token_ids:
                    return tokens, "stop", token
                if token == self.eos and not sampling.ignore_eos:
                    return tokens, "stop", None
            if len(tokens) == sampling.max_tokens:
                break
        return tokens, "length", None

    async def _pause(self, seconds: float, abort: asyncio.Event) -> None:
        if seconds:
            waits = [
                asyncio.ensure_future(event.wait()) for event in (abort, self._death) if event is not None
            ]
            try:
                await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        else:
            await asyncio.sleep(0)
        while self.stopped and not abort.is_set() and self.dead is None:  # noqa: ASYNC110 (set from other threads)
            await asyncio.sleep(0.001)
        if self.dead is not None:
            raise BackendError(self.dead)

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        others = [(token + i) % self.vocab_size for i in range(top)]
        entries = [(other, -0.5 - i) for i, other in enumerate(others)]
        return TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=entries)

    async def abort(self, request_id: str) -> None:
        if request_id in self.live:
            self.live[request_id].set()

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self.live)
        self._stats.num_blocks_used = len(self.live)
        return self._stats

    async def reset_prefix_cache(self) -> bool:
        return not self.live

    async def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        unknown = set(changes) - set(self.info.settings)
        if unknown:
            raise ConfigError(f"{', '.join(sorted(unknown))} cannot be changed at run time")
        self.info.settings.update(changes)
        return self.info.settings
