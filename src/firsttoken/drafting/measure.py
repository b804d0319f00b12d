"""What a draft brings on this machine, measured in the engine: acceptance by kind of text and temperature, and speed.

Speeds are of the stream: steps in which a first token is still awaited are not timed, since no draft can help them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.engine import Engine
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.request import Request, SamplingParams
from firsttoken.engine.runner import Runner
from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Speculator, SpeculatorFactory

Prompts = dict[str, list[list[int]]]
"""Token ids of prompts by category."""
OnProgress = Callable[[int, int, str], None]
"""(done, total, what is measured now)"""

_IN_TURN = 4
"""Texts after which the other settings get theirs."""
_SAME = 0.02
"""Speed-ups closer than this are the same: the smaller γ wins."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceRow:
    """One category at one temperature."""

    category: str
    temperature: float
    draws: Literal["noise", "argmax"]
    """How drafts are drawn where the temperature is not 0: with the noise by which the model will sample there, or
    always the draft's likeliest token."""
    acceptance_rate: float
    """Accepted over drafted tokens."""
    tokens_per_cycle: float
    per_position: list[float]
    """Chance that draft i stands if those before it did."""
    speedup: float
    """Of the stream, over the same texts without drafts."""


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One γ at one batch size, greedily, over all categories."""

    batch: int
    gamma: int
    tokens_per_cycle: float
    """Expected of the acceptance per position that the largest γ showed."""
    predicted: float
    """Speed-up by those tokens and the time of a cycle, taken to be a line in γ through the smallest and largest."""
    measured: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """All prompts answered once under one setting."""

    seconds: float
    """Of the steps after every first token."""
    steps: int
    tokens: int
    """Written in those steps."""
    cycles: int
    """Verifications, one for each sequence that had drafts."""
    drafted: list[int]
    accepted: list[int]
    """By position, and so is `drafted`."""
    texts: list[list[int]]
    """Each prompt's answer, as token ids."""

    def __add__(self, other: Run) -> Run:
        return Run(
            seconds=self.seconds + other.seconds,
            steps=self.steps + other.steps,
            tokens=self.tokens + other.tokens,
            cycles=self.cycles + other.cycles,
            drafted=_sum(self.drafted, other.drafted),
            accepted=_sum(self.accepted, other.accepted),
            texts=self.texts + other.texts,
        )

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.steps, 1)

    @property
    def acceptance_rate(self) -> float:
        return sum(self.accepted) / max(sum(self.drafted), 1)

    @property
    def tokens_per_cycle(self) -> float:
        return 1 + sum(self.accepted) / max(self.cycles, 1)

    @property
    def per_position(self) -> list[float]:
        reached = [self.cycles, *self.accepted]
        return [a / r if r else 0.0 for a, r in zip(self.accepted, reached, strict=False)]


def small_engine(
    model: Path,
    *,
    batch: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32"] = "auto",
) -> EngineConfig:
    """An engine that holds `batch` chats of at most 2,048 tokens and leaves the rest of the memory to the draft."""
    config = ModelConfig.from_folder(model)
    longest = min(2048, config.context_length)
    return EngineConfig(
        model=str(model),
        device=device,
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=batch,
        kv_cache_memory=str(config.kv_bytes_per_token(4) * (longest + 16) * batch),
    )


class DraftMeter:
    """An engine that answers the same prompts with a draft and without.

    Texts are the same either way, by the request's seed, but for the rounding of a verified row (none in float32).
    """

    def __init__(
        self, config: EngineConfig, draft: str, make_speculator: SpeculatorFactory, *, max_tokens: int = 128
    ) -> None:
        """config: of the engine; its settings of speculation are the meter's own. Loads the model."""
        self.draft, self.max_tokens = draft, max_tokens
        self._argmax = False

        def make(config: EngineConfig, costs: CostModel, runner: Runner) -> Speculator | None:
            made = make_speculator(config, costs, runner)
            return _ArgmaxDrafts(made) if made is not None and self._argmax else made

        self.engine = Engine(replace(config, speculation="off"), make_speculator=make)
        self.engine.warmup()

    def acceptance(
        self,
        prompts: Prompts,
        *,
        gamma: int = 5,
        temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
        batch: int = 1,
        on_progress: OnProgress = lambda done, total, word: None,
    ) -> list[AcceptanceRow]:
        """A row for each category, temperature and (above 0) way of drawing drafts."""
        cells = [(temperature, category) for temperature in temperatures for category in prompts]
        rows: list[AcceptanceRow] = []
        for done, (temperature, category) in enumerate(cells):
            on_progress(done, len(cells), f"{category}, T = {temperature:g}")
            ways: list[Literal["noise", "argmax"]] = ["noise", "argmax"] if temperature else ["noise"]
            settings = [(0, False), *((gamma, draws == "argmax") for draws in ways)]
            plain, *runs = self._in_turn(prompts[category], settings, temperature, batch)
            rows += [
                AcceptanceRow(
                    category=category,
                    temperature=temperature,
                    draws=draws,
                    acceptance_rate=run.acceptance_rate,
                    tokens_per_cycle=run.tokens_per_cycle,
                    per_position=run.per_position,
                    speedup=run.rate / plain.rate if plain.rate else 1.0,
                )
                for draws, run in zip(ways, runs, strict=True)
            ]
        on_progress(len(cells), len(cells), "")
        return rows

    def speed(
        self,
        prompts: Prompts,
        *,
        gammas: tuple[int, ...] = (1, 2, 3, 5, 7),
        batches: tuple[int, ...] = (1, 4),
        on_progress: OnProgress = lambda done, total, word: None,
    ) -> list[SpeedRow]:
        """gammas: ascending, none 0. A row for each γ and batch size, by batch size."""
        texts = list(_interleaved(prompts))
        rows = []
        settings = [(gamma, False) for gamma in (0, *gammas)]
        total, done = sum(len(_parts(texts, batch)) for batch in batches) * len(settings), 0

        def next_run() -> None:
            nonlocal done
            on_progress(done, total, f"γ {gammas[0]} … {gammas[-1]}, {batch} at a time")
            done += 1

        for batch in batches:
            found = self._in_turn(texts, settings, 0.0, batch, next_run)
            runs = dict(zip((0, *gammas), found, strict=True))
            plain, first, last = runs[0], runs[gammas[0]], runs[gammas[-1]]
            if not all(run.seconds for run in runs.values()):
                continue  # every answer was one token: there is no stream
            for gamma in gammas:
                span = max(gammas[-1] - gammas[0], 1)
                slope = (last.step_seconds - first.step_seconds) / span
                seconds = first.step_seconds + slope * (gamma - gammas[0])
                tokens = expected_tokens(last.per_position, gamma)
                rows.append(
                    SpeedRow(
                        batch=batch,
                        gamma=gamma,
                        tokens_per_cycle=tokens,
                        predicted=tokens * plain.step_seconds / seconds,
                        measured=runs[gamma].rate / plain.rate,
                    )
                )
        on_progress(total, total, "")
        return rows

    def _in_turn(
        self,
        texts: list[list[int]],
        settings: list[tuple[int, bool]],
        temperature: float,
        batch: int,
        begins: Callable[[], None] = lambda: None,
    ) -> list[Run]:
        """Each setting's (γ, argmax) run over all texts, taken in turn every few texts: a machine's speed drifts over
        minutes, and only what was measured side by side can be compared."""
        sums: list[Run | None] = [None] * len(settings)
        for some in _parts(texts, batch):
            for i, (gamma, argmax) in enumerate(settings):
                begins()
                run = self.run(some, gamma, temperature=temperature, batch=batch, argmax=argmax)
                before = sums[i]
                sums[i] = run if before is None else before + run
        return [run for run in sums if run is not None]

    def run(
        self,
        prompts: list[list[int]],
        gamma: int,
        *,
        temperature: float = 0.0,
        batch: int = 1,
        argmax: bool = False,
    ) -> Run:
        """Answers all prompts, `batch` at a time, with γ drafts in every step (0: without the draft)."""
        self._argmax = argmax
        on = {"draft": self.draft, "speculation": "always", "num_speculative_tokens": gamma}
        self.engine.reconfigure(on if gamma else {"speculation": "off"})
        self.engine.reset_prefix_cache()
        before = self._counters()
        sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=self.max_tokens)
        texts: list[list[int]] = [[] for _ in prompts]
        seconds, steps, tokens = 0.0, 0, 0
        for first in range(0, len(prompts), batch):
            awaited = set()
            for i, ids in enumerate(prompts[first : first + batch], start=first):
                awaited.add(str(i))
                self.engine.add_request(Request(request_id=str(i), prompt_token_ids=ids, sampling=sampling))
            while self.engine.has_work():
                started = time.perf_counter()
                outputs = self.engine.step()
                if not awaited:
                    seconds += time.perf_counter() - started
                    steps += 1
                    tokens += sum(len(output.token_ids) for output in outputs)
                for output in outputs:
                    texts[int(output.request_id)] += output.token_ids
                awaited -= {output.request_id for output in outputs if output.token_ids}
        after = self._counters()
        drafted, accepted = (_growth(before[name], after[name]) for name in ("drafted", "accepted"))
        return Run(
            seconds=seconds,
            steps=steps,
            tokens=tokens,
            cycles=after["cycles"] - before["cycles"],
            drafted=drafted,
            accepted=accepted + [0] * (len(drafted) - len(accepted)),
            texts=texts,
        )

    def _counters(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {
            "cycles": stats["num_drafts"],
            "drafted": stats["draft_tokens_per_pos"],
            "accepted": stats["accepted_tokens_per_pos"],
        }


def expected_tokens(per_position: list[float], gamma: int) -> float:
    """Tokens of a verification of γ drafts, the model's own included (Leviathan et al., 2023)."""
    total = chance = 1.0
    for rate in per_position[:gamma]:
        chance *= rate
        total += chance
    return total


def best_gamma(rows: list[SpeedRow], batch: int) -> int:
    """The γ to use at this batch size: the fastest as measured, 0 if none is faster than no drafts."""
    mine = [row for row in rows if row.batch == batch]
    fastest = max((row.measured for row in mine), default=0.0)
    if fastest <= 1 + _SAME:
        return 0
    return min(row.gamma for row in mine if row.measured >= fastest - _SAME)


class _ArgmaxDrafts:
    """A drafter made to draft its likeliest token, by showing it greedy requests; what else is asked goes through."""

    def __init__(self, inner: Speculator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        requests = [seq.request for seq in seqs]
        for seq in seqs:
            seq.request = replace(seq.request, sampling=replace(seq.request.sampling, temperature=0.0))
        try:
            return self._inner.propose(seqs, budget)
        finally:
            for seq, request in zip(seqs, requests, strict=True):
                seq.request = request


def _interleaved(prompts: Prompts) -> Iterator[list[int]]:
    """Category by category in turn, so that a batch holds several kinds of text."""
    for place in range(max(map(len, prompts.values()), default=0)):
        for texts in prompts.values():
            yield from texts[place : place + 1]


def _parts(texts: list[list[int]], batch: int) -> list[list[list[int]]]:
    size = max(batch, _IN_TURN)
    return [texts[first : first + size] for first in range(0, len(texts), size)]


def _growth(before: list[int], after: list[int]) -> list[int]:
    return [a - b for a, b in zip(after, before + [0] * (len(after) - len(before)), strict=True)]


def _sum(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
