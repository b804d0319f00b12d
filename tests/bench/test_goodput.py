"""Goodput: the load is the same for both policies, and the figures follow from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from firsttoken.bench import prompts
from firsttoken.bench.client import Client, ClientHealth, Record
from firsttoken.bench.goodput import (
    KINDS,
    GoodputPlan,
    Kind,
    PolicyTrial,
    mixed_calls,
    run_goodput,
    steps,
)
from firsttoken.bench.stamped_http import Http

SMALL = (Kind("short", 0.75, 10, 2), Kind("long", 0.25, 120, 2))


def test_calls_have_the_shares_and_share_nothing() -> None:
    calls = mixed_calls(100, KINDS, prompts.load(), seed=1)
    assert Counter(call.category for call in calls) == {"short": 60, "medium": 30, "long": 10}
    assert len({call.extra["cache_salt"] for call in calls}) == 100
    texts = [call.messages[0]["content"] for call in calls]
    assert len({text[:16] for text in texts}) == 100
    for call, text in zip(calls, texts, strict=True):
        kind = next(kind for kind in KINDS if kind.name == call.category)
        assert len(text.split()) == kind.words


def test_the_same_seed_asks_the_same() -> None:
    first, second = (mixed_calls(20, KINDS, prompts.load(), seed=4) for _ in range(2))
    assert [call.messages for call in first] == [call.messages for call in second]
    assert [call.messages for call in mixed_calls(20, KINDS, prompts.load(), seed=5)] != [
        call.messages for call in first
    ]


def test_arrivals_suffice_for_a_queue() -> None:
    plan = GoodputPlan(model="m", overload=2.0)
    # half of 120 are waiting at the end: 6 s of work, three limits
    assert plan.arrivals(capacity=10.0, slo_ms=2000) == 120
    assert plan.arrivals(capacity=0.1, slo_ms=100) == 60
    assert plan.arrivals(capacity=1e4, slo_ms=1e4) == 600
    assert GoodputPlan(model="m", overload=0.5).arrivals(capacity=4.0, slo_ms=2000) == 60
    assert GoodputPlan(model="m", requests=7).arrivals(capacity=4.0, slo_ms=2000) == 7


def test_met_counts_from_the_intended_time() -> None:
    late = Record(category="short", intended=0.0, sent=0.4, chunks=[(0.2, "a")], status=200)
    soon = Record(category="long", intended=0.0, sent=0.0, chunks=[(0.2, "a")], status=200)
    lost = Record(category="long", error="gone")
    trial = PolicyTrial(policy="fcfs", repeat=0, wall=1.0, records=[late, soon, lost], health=ClientHealth())
    assert trial.met(300) == (1, 3)
    assert trial.met(300, "short") == (0, 1)
    assert trial.longest_wait() == pytest.approx(600)


async def test_both_policies_see_the_same_arrivals(mock: Callable[..., str]) -> None:
    url = mock("--slots", "2", "--prefill", "50us")
    plan = GoodputPlan(model="mock", requests=12, repeats=3, concurrency=4, kinds=SMALL)
    heard: list[str] = []
    async with Http(url, timeout=30) as http:
        client = Client(http, "mock")
        before = await client.get_json("/settings")
        report = await run_goodput(client, plan, prompts.load(), progress=heard.append)
        assert await client.get_json("/settings") == before
    assert len(heard) == steps(plan)
    assert len(report.trials) == 6
    for repeat in range(3):
        one, other = (trial for trial in report.trials if trial.repeat == repeat)
        assert {one.policy, other.policy} == {"fcfs", "deadline"}
        assert [r.name for r in one.records] == [r.name for r in other.records]
        gaps = [
            [b.intended - a.intended for a, b in zip(t.records, t.records[1:], strict=False)]
            for t in (one, other)
        ]
        assert gaps[0] == pytest.approx(gaps[1], abs=1e-6)
    assert report.slo_ms == 2 * max(report.idle_ttft_ms.values())
    assert report.rate == pytest.approx(1.3 * report.capacity)
    assert all(row.failed == 0 for row in report.rows)
