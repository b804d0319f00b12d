"""Goodput above capacity: the same arrivals under two orders of admission, and who waited how long.

An open-loop load of mixed prompt lengths arrives faster than the server can serve. Somebody must wait; the order
decides how many still get their first token within the limit, and whether anybody is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from firsttoken.bench import machine, metrics
from firsttoken.bench.client import Call, Client, ClientHealth, Record
from firsttoken.bench.controls import Controls
from firsttoken.bench.load import Trial, closed_loop, open_loop, poisson_times
from firsttoken.bench.prompts import PromptSet
from firsttoken.engine.config import ConfigError

POLICIES = ("fcfs", "deadline")


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of requests: its share of the arrivals and its size."""

    name: str
    share: float
    words: int
    """Words of the prompt; about 1.3 tokens each."""
    max_tokens: int


KINDS = (
    Kind("short", 0.6, 30, 16),
    Kind("medium", 0.3, 220, 16),
    Kind("long", 0.1, 900, 16),
)
"""A chat's mix: mostly short turns, some with context, now and then a pasted document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPlan:
    model: str
    overload: float = 1.3
    """Arrival rate as a multiple of the measured capacity."""
    requests: int | None = None
    """Arrivals per trial. None: so many that in order of arrival the last would wait for three limits; with
    fewer the overload has not built up a queue yet, and every order looks the same."""
    repeats: int = 3
    ttft_slo_ms: float | None = None
    """None: twice the time to first token of the longest kind on the idle server, so that all can meet it."""
    seed: int = 0
    concurrency: int = 16
    """Users of the closed loop that measures capacity."""
    kinds: tuple[Kind, ...] = KINDS

    def arrivals(self, capacity: float, slo_ms: float) -> int:
        """A queue grows by (1 − 1/overload) requests per arrival, and each of them waits 1/capacity seconds."""
        if self.requests is not None:
            return self.requests
        growth = 1 - 1 / self.overload if self.overload > 1 else 1.0
        return min(600, max(60, math.ceil(3 * slo_ms / 1e3 * capacity / growth)))


@dataclass(slots=True, kw_only=True)
class PolicyTrial:
    """One policy under one sequence of arrivals, raw."""

    policy: str
    repeat: int
    wall: float
    records: list[Record]
    health: ClientHealth
    untrusted: str | None = None

    def longest_wait(self) -> float | None:
        """ms from intent to first token of the request that waited longest."""
        return max(filter(None, map(metrics.ttft_intended, self.records)), default=None)

    def met(self, slo_ms: float, kind: str | None = None) -> tuple[int, int]:
        """(requests within the limit, requests), of one kind or of all."""
        mine = [record for record in self.records if kind in (None, record.category)]
        return sum(metrics.meets(record, {"ttft_intended": slo_ms}) for record in mine), len(mine)


@dataclass(slots=True, kw_only=True)
class PolicyRow:
    policy: str
    goodput: metrics.Spread | None
    """Requests per second whose first token came within the limit."""
    share_met: metrics.Spread | None
    """% of the requests."""
    share_met_by_kind: dict[str, metrics.Spread | None]
    ttft_p50: metrics.Spread | None
    ttft_p99: metrics.Spread | None
    longest_wait_ms: float | None
    """The worst of all repeats."""
    failed: int


@dataclass(slots=True, kw_only=True)
class GoodputReport:
    plan: GoodputPlan
    machine: dict[str, Any]
    command: str
    date: str
    server: dict[str, Any]
    idle_ttft_ms: dict[str, float]
    """Median TTFT of each kind on the idle server."""
    capacity: float
    """Requests per second of the closed loop."""
    rate: float
    requests: int
    """Arrivals per trial."""
    slo_ms: float
    rows: list[PolicyRow]
    ratio: metrics.Spread | None
    """Goodput of `deadline` over that of `fcfs`, repeat by repeat."""
    trials: list[PolicyTrial] = field(default_factory=list)
    untrusted: str | None = None

    def json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def mixed_calls(count: int, kinds: Sequence[Kind], prompt_set: PromptSet, seed: int) -> list[Call]:
    """`count` calls of the given kinds in random order, the same for a seed.

    Shares are met exactly up to rounding. No two share a prefix or a cache namespace: what is measured is the
    order of computing, not the cache."""
    draw = random.Random(seed)
    sizes = [round(count * kind.share) for kind in kinds]
    sizes[0] += count - sum(sizes)
    order = [kind for kind, size in zip(kinds, sizes, strict=True) for _ in range(size)]
    draw.shuffle(order)
    sentences = re.split(r"(?<=[.?!])\s+", prompt_set.system)
    calls = []
    for number, kind in enumerate(order):
        words = ["Note", f"{draw.randrange(10**9)}:"]
        while len(words) < kind.words:
            words += draw.choice(sentences).split()
        messages = [{"role": "user", "content": " ".join(words[: kind.words])}]
        extra = {"temperature": 0, "ignore_eos": True, "cache_salt": uuid.uuid4().hex}
        calls.append(
            Call(
                messages=messages,
                max_tokens=kind.max_tokens,
                name=f"{kind.name}-{number}",
                category=kind.name,
                extra=extra,
            )
        )
    return calls


async def run_goodput(
    client: Client,
    plan: GoodputPlan,
    prompt_set: PromptSet,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> GoodputReport:
    """Measures capacity, then both policies under the same arrivals. `progress` hears of every step that starts;
    there are `steps(plan)` of them. Leaves the server with the settings that it had."""
    controls = Controls(client)
    await controls.check()
    initial = dict(controls.settings)
    try:
        progress("idle server")
        idle = await _idle_ttft(client, plan, prompt_set)
        slo = plan.ttft_slo_ms or 2 * max(idle.values())
        progress("capacity")
        await controls.reconfigure({"scheduling_policy": "fcfs", "ttft_slo_ms": None})
        capacity = await _capacity(client, plan, prompt_set)
        rate, count = capacity * plan.overload, plan.arrivals(capacity, slo)
        trials: list[PolicyTrial] = []
        draw = random.Random(plan.seed)
        for repeat in range(plan.repeats):
            order = list(POLICIES)
            draw.shuffle(order)
            for policy in order:
                progress(f"{policy}, repeat {repeat + 1}")
                limit = slo if policy == "deadline" else None
                await controls.reconfigure({"scheduling_policy": policy, "ttft_slo_ms": limit})
                await controls.reset_prefix_cache()
                trials.append(await _policy_trial(client, plan, prompt_set, policy, repeat, rate, count))
    finally:
        names = ("scheduling_policy", "ttft_slo_ms")
        with suppress(ConfigError):  # the server is gone or still busy: the first error is the one to show
            await controls.reconfigure({name: initial[name] for name in names if name in initial})
    return GoodputReport(
        plan=plan,
        machine=machine.describe(),
        command=machine.command(),
        date=machine.now(),
        server=initial,
        idle_ttft_ms=idle,
        capacity=capacity,
        rate=rate,
        requests=count,
        slo_ms=slo,
        rows=[_row(policy, trials, slo, plan) for policy in POLICIES],
        ratio=_ratio(trials, slo),
        trials=trials,
        untrusted=next((trial.untrusted for trial in trials if trial.untrusted), None),
    )


def steps(plan: GoodputPlan) -> int:
    return 2 + plan.repeats * len(POLICIES)


async def _idle_ttft(client: Client, plan: GoodputPlan, prompt_set: PromptSet) -> dict[str, float]:
    """Median TTFT in ms of each kind, one request at a time."""
    found = {}
    for kind in plan.kinds:
        alone = Kind(kind.name, 1.0, kind.words, kind.max_tokens)
        trial = await closed_loop(client, mixed_calls(4, [alone], prompt_set, plan.seed - 1), 1)
        value = metrics.over_requests("ttft", trial.records[1:], 50)  # the first one warms up
        if value is None:
            raise ConfigError(f"the server did not answer {kind.name} prompts: {trial.records[-1].error}")
        found[kind.name] = value
    return found


async def _capacity(client: Client, plan: GoodputPlan, prompt_set: PromptSet) -> float:
    """Requests per second that the server completes when there is always work."""
    trial = await closed_loop(
        client, mixed_calls(3 * plan.concurrency, plan.kinds, prompt_set, plan.seed - 2), plan.concurrency
    )
    _all_ok(trial)
    return len(trial.records) / trial.wall


async def _policy_trial(
    client: Client,
    plan: GoodputPlan,
    prompt_set: PromptSet,
    policy: str,
    repeat: int,
    rate: float,
    count: int,
) -> PolicyTrial:
    calls = mixed_calls(count, plan.kinds, prompt_set, plan.seed + repeat)
    trial = await open_loop(client, calls, poisson_times(count, rate, plan.seed + repeat))
    await asyncio.sleep(0.05)
    return PolicyTrial(
        policy=policy,
        repeat=repeat,
        wall=trial.wall,
        records=trial.records,
        health=trial.health,
        untrusted=trial.health.verdict(trial.ttft_p50_seconds()),
    )


def _all_ok(trial: Trial) -> None:
    failed = next((record.error for record in trial.records if record.error), None)
    if failed:
        raise ConfigError(f"the server failed while its capacity was measured: {failed}")


def _row(policy: str, trials: Sequence[PolicyTrial], slo: float, plan: GoodputPlan) -> PolicyRow:
    mine = [trial for trial in trials if trial.policy == policy]

    def share(kind: str | None) -> metrics.Spread | None:
        pairs = [trial.met(slo, kind) for trial in mine]
        return metrics.spread(100 * met / total if total else None for met, total in pairs)

    return PolicyRow(
        policy=policy,
        goodput=metrics.spread(_goodput(trial, slo) for trial in mine),
        share_met=share(None),
        share_met_by_kind={kind.name: share(kind.name) for kind in plan.kinds},
        ttft_p50=metrics.spread(metrics.over_requests("ttft_intended", t.records, 50) for t in mine),
        ttft_p99=metrics.spread(metrics.over_requests("ttft_intended", t.records, 99) for t in mine),
        longest_wait_ms=max(filter(None, (trial.longest_wait() for trial in mine)), default=None),
        failed=sum(not record.ok for trial in mine for record in trial.records),
    )


def _goodput(trial: PolicyTrial, slo: float) -> float | None:
    return metrics.goodput(trial.records, trial.wall, {"ttft_intended": slo})


def _ratio(trials: Sequence[PolicyTrial], slo: float) -> metrics.Spread | None:
    """Deadline over fcfs for each repeat: both saw the same arrivals."""
    by_cell = {(trial.policy, trial.repeat): _goodput(trial, slo) for trial in trials}
    ratios = []
    for repeat in sorted({trial.repeat for trial in trials}):
        before, after = by_cell.get(("fcfs", repeat)), by_cell.get(("deadline", repeat))
        ratios.append(after / before if before and after is not None else None)
    return metrics.spread(ratios)
