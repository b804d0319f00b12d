"""Runs the stages against a server: trials in random order, each with its own cache namespace, resumable."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from firsttoken.backends.process import available_cores
from firsttoken.bench import machine
from firsttoken.bench.client import Call, Client, Refused
from firsttoken.bench.controls import Controls, growth
from firsttoken.bench.load import closed_loop
from firsttoken.bench.prompts import Prompt, PromptSet
from firsttoken.bench.raw_draft import raw_stages
from firsttoken.bench.stages import (
    Expected,
    Row,
    Stage,
    TrialResult,
    broken_premise,
    headline,
    stages,
    summarise,
)
from firsttoken.bench.stamped_http import Unreachable, clock
from firsttoken.engine.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a run; a run with the same plan can go on where it was interrupted."""

    model: str
    concurrency: tuple[int, ...] = (1, 4)
    repeats: int = 3
    prompts: int = 4
    """Measured requests per trial; at concurrency c at least two for every user."""
    max_tokens: int = 20
    seed: int = 0
    server: str = ""
    """The address, or the flags, of the server: part of what must be equal to resume."""
    raw_draft: Literal["off", "short", "full"] = "off"
    """Rows of the model's untrained first layers as a draft: none, one trial of one request, or as all other stages."""

    def prompts_at(self, concurrency: int) -> int:
        return max(self.prompts, 2 * concurrency)

    def requests_words(self) -> str:
        return ", ".join(f"{self.prompts_at(c)} at concurrency {c}" for c in self.concurrency)

    def order(self, every: Sequence[Stage]) -> list[tuple[int, str, int]]:
        """(repeat, stage, concurrency) of every trial: a repeat has all of them, in an order of its own."""
        draw, order = random.Random(self.seed), []
        for repeat in range(self.repeats):
            cells = [
                (repeat, stage.key, concurrency)
                for stage in every
                for concurrency in self.concurrency
                if not self.short(stage) or (repeat == 0 and concurrency == min(self.concurrency))
            ]
            draw.shuffle(cells)
            order += cells
        return order

    def short(self, stage: Stage) -> bool:
        return stage.raw and self.raw_draft == "short"

    def requests(self, stage: Stage, concurrency: int) -> int:
        return 1 if self.short(stage) else self.prompts_at(concurrency)

    def fingerprint(self, prompt_set: PromptSet) -> str:
        what = json.dumps([asdict(self), prompt_set.version, machine.describe()], sort_keys=True)
        return hashlib.sha256(what.encode()).hexdigest()[:16]


def planned_stages(max_num_seqs: int, raw: Path | None, own: dict[str, Any]) -> list[Stage]:
    """The stages of a run. raw: folder of the untrained draft, if it is to be shown too. own: the server's own settings
    of drafting, which every other stage then names, since a setting stays until it is changed."""
    every = stages(max_num_seqs)
    if raw is None:
        return list(every)
    batch = next(stage.settings for stage in every if stage.key == "2")
    named = [replace(stage, settings=own | stage.settings) for stage in every]
    return [*named, *raw_stages(raw, batch)]


class Journal:
    """Finished trials, one JSON line each, so that an interrupted run loses at most the trial it was in."""

    def __init__(self, path: Path):
        self.path = path
        self._decoder = msgspec.json.Decoder(TrialResult)

    def read(self) -> list[TrialResult]:
        """What is there; a last line cut short by the interruption is dropped."""
        results = []
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                try:
                    results.append(self._decoder.decode(line))
                except msgspec.DecodeError:
                    break
        return results

    def rewrite(self, results: Sequence[TrialResult]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"".join(msgspec.json.encode(result) + b"\n" for result in results))

    def append(self, result: TrialResult) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(slots=True, kw_only=True)
class StagesReport:
    """All that a run found: the table, the raw trials, and on what."""

    plan: Plan
    machine: dict[str, Any]
    command: str
    date: str
    server: dict[str, Any]
    """The server's effective settings before the first stage."""
    stages: list[Stage]
    rows: list[Row]
    trials: list[TrialResult]
    resumed: int = 0
    """Trials that were taken over from an interrupted run."""
    seconds: float = 0.0
    headline: str | None = None
    premises: dict[str, Any] = field(default_factory=dict)

    def json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


async def run_stages(
    client: Client,
    plan: Plan,
    prompt_set: PromptSet,
    journal: Journal,
    *,
    raw_draft: Path | None = None,
    done: Callable[[TrialResult], None] = lambda result: None,
    begins: Callable[[Stage, int, int], None] = lambda stage, concurrency, repeat: None,
) -> StagesReport:
    """Runs what the journal does not hold yet. raw_draft: its folder, if the plan wants those rows. `begins` and
    `done` hear of every trial, for a progress bar.

    Leaves the server with the settings that it had.
    """
    began = clock()
    controls = Controls(client)
    await controls.check()
    initial = dict(controls.settings)
    own = {name: initial.get(name) for name in ("draft", "num_speculative_tokens")}
    all_stages = planned_stages(max(int(initial.get("max_num_seqs", 64)), *plan.concurrency), raw_draft, own)
    by_key = {stage.key: stage for stage in all_stages}
    expected = await _expected(client, controls, plan, prompt_set)
    results = journal.read()
    journal.rewrite(results)
    have = {(r.repeat, r.stage, r.concurrency) for r in results}
    resumed = len(results)
    for result in results:
        done(result)
    try:
        await client.send(_call(prompt_set.warmup[0], 8, "warm-up"))
        for repeat, key, concurrency in plan.order(all_stages):
            if (repeat, key, concurrency) in have:
                continue
            stage = by_key[key]
            begins(stage, concurrency, repeat)
            started = clock() - began
            result = await run_trial(client, controls, stage, plan, prompt_set, expected, concurrency, repeat)
            result.started = started
            results.append(result)
            journal.append(result)
            done(result)
    finally:
        await _restore(controls, initial, all_stages)
    rows = summarise(all_stages, results)
    return StagesReport(
        plan=plan,
        machine=machine.describe(),
        command=machine.command(),
        date=machine.now(),
        server=initial,
        stages=all_stages,
        rows=rows,
        trials=results,
        resumed=resumed,
        seconds=clock() - began,
        headline=headline(rows),
        premises={"shared_tokens": expected.shared_tokens, "least_cached": expected.least_cached},
    )


async def run_trial(
    client: Client,
    controls: Controls,
    stage: Stage,
    plan: Plan,
    prompt_set: PromptSet,
    expected: Expected,
    concurrency: int,
    repeat: int,
) -> TrialResult:
    """One trial: switch, forget, warm up, prime if the stage is cached, measure, check the premise."""
    await controls.reconfigure(stage.settings)
    await controls.reset_prefix_cache()
    settings = dict(controls.settings)
    salt = uuid.uuid4().hex
    await client.send(_call(prompt_set.warmup[0], 4, f"warm-up-{salt}"))
    prompts = prompt_set.pick(plan.requests(stage, concurrency), plan.seed + repeat)
    if stage.cached:
        # The shared system prompt enters this trial's cache, with a turn that is never measured.
        primer = Prompt("prime", "warmup", prompt_set.warmup[1].turn, prompt_set.system)
        primed = (await client.send(_call(primer, 1, salt))).read()
        if primed.error:
            raise ConfigError(f"the server failed while the cache was primed: {primed.error}")
    calls = [_call(prompt, plan.max_tokens, salt) for prompt in prompts]
    before = await controls.counters()
    with machine.GpuMeter() as gpu:
        trial = await closed_loop(client, calls, concurrency)
    await asyncio.sleep(0.05)  # the server's counters are at most one step old
    counters = growth(before, await controls.counters()) | {"cores": float(available_cores())}
    if gpu.percent is not None and controls.settings.get("device") == "cuda":
        counters["gpu_percent"] = gpu.percent
    result = TrialResult(
        stage=stage.key,
        concurrency=concurrency,
        repeat=repeat,
        cache_salt=salt,
        wall=trial.wall,
        records=trial.records,
        counters=counters,
        health=trial.health,
        settings=settings,
        speculation=await controls.speculation(),
        untrusted=trial.health.verdict(trial.ttft_p50_seconds()),
    )
    result.invalid = broken_premise(stage, result, expected)
    return result


def _call(prompt: Prompt, max_tokens: int, salt: str) -> Call:
    """Greedy, of exactly `max_tokens` tokens, in the cache namespace `salt`."""
    return Call(
        messages=prompt.messages,
        max_tokens=max_tokens,
        name=prompt.name,
        category=prompt.category,
        extra={"temperature": 0, "ignore_eos": True, "cache_salt": salt},
    )


async def _expected(client: Client, controls: Controls, plan: Plan, prompt_set: PromptSet) -> Expected:
    try:
        body = {
            "model": client.model,
            "messages": [{"role": "system", "content": prompt_set.system}],
            "add_generation_prompt": False,
        }
        shared = int((await client.post_json("/tokenize", body))["count"])
    except (Refused, KeyError, TypeError) as error:
        raise ConfigError(
            f"the server's /tokenize does not count the system prompt's tokens: {error}"
        ) from None
    return Expected(
        max_tokens=plan.max_tokens,
        shared_tokens=shared,
        block_size=int(controls.settings.get("block_size") or 16),
    )


async def _restore(controls: Controls, initial: dict[str, Any], all_stages: Sequence[Stage]) -> None:
    """Gives the server back as it was found; if it is gone there is nothing to give back."""
    touched = {name for stage in all_stages for name in stage.settings}
    with suppress(Unreachable, Refused):
        await controls.reconfigure({name: initial[name] for name in touched if name in initial})
