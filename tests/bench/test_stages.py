"""The stages: premises that catch what they claim to catch, and runs against the mock server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench import prompts
from firsttoken.bench.client import Client, ClientHealth, Record
from firsttoken.bench.controls import growth, read_counters
from firsttoken.bench.stages import (
    Expected,
    Stage,
    TrialResult,
    broken_premise,
    headline,
    stages,
    summarise,
)
from firsttoken.bench.stages_run import Journal, Plan, StagesReport, run_stages
from firsttoken.bench.stamped_http import Http
from firsttoken.engine.config import ConfigError

ALL = {stage.key: stage for stage in stages(64)}
EXPECTED = Expected(max_tokens=4, shared_tokens=640, block_size=16)


def record(start: float, cached: int, **changes: Any) -> Record:
    given: dict[str, Any] = {
        "name": f"chat-{start:g}",
        "sent": start,
        "intended": start,
        "chunks": [(0.1, "a"), (0.2, "b"), (0.3, "c"), (0.4, "d")],
        "ended": 0.41,
        "status": 200,
        "prompt_tokens": 660,
        "cached_tokens": cached,
        "completion_tokens": 4,
    }
    return Record(**(given | changes))


def result(key: str, concurrency: int = 4, **changes: Any) -> TrialResult:
    """A trial of stage `key` whose premises hold."""
    stage = ALL[key]
    cached = 640 if stage.cached else 0
    gap = 0.05 if stage.batched and concurrency > 1 else 1.0
    given: dict[str, Any] = {
        "stage": key,
        "concurrency": concurrency,
        "repeat": 0,
        "cache_salt": "s",
        "wall": 2.0,
        "records": [record(i * gap, cached) for i in range(4)],
        "counters": {"drafted": 20.0 if key == "3" else 0.0, "accepted": 5.0, "drafts": 5.0},
        "health": ClientHealth(),
        "settings": dict(stage.settings),
        "speculation": {"reason": "too few accepted"} if key == "3a" else {},
    }
    return TrialResult(**(given | changes))


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("key", list(ALL))
def test_premises_that_hold(key: str, concurrency: int) -> None:
    assert broken_premise(ALL[key], result(key, concurrency), EXPECTED) is None


OVERLAPPING = [record(i * 0.05, 640) for i in range(4)]
APART = [record(i * 1.0, 640) for i in range(4)]


@pytest.mark.parametrize(
    ("key", "fault", "message"),
    [
        ("0", {"records": [record(0, 0), record(1, 640)]}, "the cache should be off"),
        ("0", {"records": [record(0, None)]}, "does not report cached_tokens"),  # type: ignore[arg-type]
        ("1", {"records": [record(0, 1280)]}, "1280 of 660 prompt tokens cannot have come"),
        ("0", {"records": [record(0, 0), record(0.1, 0)]}, "2 answers were growing at once"),
        ("0", {"counters": {"drafted": 3.0}}, "3 tokens were drafted"),
        ("0", {"records": []}, "no request was sent"),
        ("0", {"records": [record(0, 0, error="HTTP 500")]}, "1 of 1 requests failed: HTTP 500"),
        ("0", {"records": [record(0, 0, completion_tokens=3)]}, "do not have 4 tokens"),
        ("0", {"records": [record(0, 0, completion_tokens=None)]}, "does not report completion_tokens"),
        ("1", {"records": [record(0, 640), record(1, 607)]}, "only 607 prompt tokens"),
        ("1", {"records": OVERLAPPING}, "growing at once"),
        ("1", {"settings": ALL["1"].settings | {"max_num_seqs": 64}}, "max_num_seqs is 64, not 1"),
        ("2", {"records": APART}, "never did two answers"),
        ("3", {"counters": {"drafted": 0.0}}, "nothing was drafted"),
        ("3", {"counters": {}}, "does not count drafted tokens"),
        ("3a", {"counters": {"drafted": 0.0}, "speculation": {}}, "gives no reason"),
    ],
)
def test_premises_that_break(key: str, fault: dict[str, Any], message: str) -> None:
    assert message in (broken_premise(ALL[key], result(key, **fault), EXPECTED) or "")


def test_each_stage_adds_one_thing() -> None:
    cold, cache, batch, always, auto = ALL.values()
    assert not cold.settings["enable_prefix_caching"]
    assert {k for k in cold.settings if cold.settings[k] != cache.settings[k]} == {"enable_prefix_caching"}
    added = {k for k in cold.settings if cache.settings[k] != batch.settings[k]}
    assert added == {"max_num_seqs", "enable_chunked_prefill"}
    assert {k for k in cold.settings if batch.settings[k] != always.settings[k]} == {"speculation"}
    assert auto.settings == batch.settings | {"speculation": "auto"}


# ------------------------------------------------------------------ rows


def test_rows_use_valid_repeats_only() -> None:
    good = [result("1", repeat=i, wall=2.0 + i) for i in range(3)]
    bad = result("1", repeat=3, wall=0.001, invalid="the cache was off")
    row = summarise([ALL["1"]], [*good, bad])[0]
    assert row.invalid == "the cache was off"
    assert row.repeats == 4
    assert row.rate is not None
    assert row.rate.n == 3
    assert row.rate.median == pytest.approx(16 / 3)
    assert row.ttft_p50 is not None
    assert row.ttft_p50.median == pytest.approx(100)


def test_texts_are_compared_prompt_by_prompt_within_a_repeat() -> None:
    first = result("0")
    other = result("2", records=[record(0, 640), record(1, 640, chunks=[(0.1, "x"), (0.2, "y")])])
    later = result("2", repeat=1)  # no stage 0 in its repeat: nothing to compare with
    row = next(row for row in summarise(list(ALL.values()), [first, other, later]) if row.stage == "2")
    assert row.same_texts == (1, 2)


def test_notes_and_headline() -> None:
    rows = summarise(list(ALL.values()), [result(key, 1) for key in ALL])
    notes = {row.stage: row.note for row in rows}
    assert notes["2"].startswith("no effect expected")
    assert notes["3a"] == "too few accepted"
    assert headline(rows) == "one user: 100 ms → 100 ms (1.0x earlier)"
    assert headline([row for row in rows if row.stage != "2"]) is None


# ------------------------------------------------------------------ plans and counters


def test_every_repeat_runs_everything_once_in_its_own_order() -> None:
    plan = Plan(model="m", concurrency=(1, 4), repeats=5)
    order = plan.order(list(ALL.values()))
    assert order == plan.order(list(ALL.values()))
    by_repeat = [[cell[1:] for cell in order if cell[0] == repeat] for repeat in range(5)]
    for cells in by_repeat:
        assert sorted(cells) == sorted(by_repeat[0])
        assert len(set(cells)) == len(ALL) * 2
    assert len({tuple(cells) for cells in by_repeat}) == 5
    assert [cell[0] for cell in order] == sorted(cell[0] for cell in order)


def test_plans_differ_in_fingerprint() -> None:
    plan, prompt_set = Plan(model="m"), prompts.load()
    assert plan.fingerprint(prompt_set) == Plan(model="m").fingerprint(prompt_set)
    for change in ({"seed": 1}, {"max_tokens": 9}, {"server": "--dtype float32"}, {"concurrency": (1,)}):
        assert replace(plan, **change).fingerprint(prompt_set) != plan.fingerprint(prompt_set)  # type: ignore[arg-type]


def test_counters_are_summed_over_labels_and_may_be_missing() -> None:
    page = (
        "# HELP x y\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a b"} 5.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a b"} 2.0\n'
        "firsttoken:engine_cpu_seconds_total 1.5e0\n"
    )
    assert read_counters(page) == {"drafted": 7.0, "cpu_seconds": 1.5}
    assert growth(
        {"drafted": 5.0, "gone": 1.0, "shrank": 3.0}, {"drafted": 7.0, "new": 1.0, "shrank": 1.0}
    ) == {"drafted": 2.0}


# ------------------------------------------------------------------ whole runs


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    async with Http(url, timeout=30) as http:
        yield Client(http, "mock")


SMALL = Plan(model="mock", concurrency=(1, 4), repeats=1, prompts=3, max_tokens=5)
QUICK = ("--ttft", "3ms", "--itl", "20ms")
"""Answers long enough that several overlap even where the machine is busy."""


async def run(url: str, journal: Path, **hooks: Any) -> StagesReport:
    async with client_of(url) as client:
        return await run_stages(client, SMALL, prompts.load(), Journal(journal), **hooks)


async def test_a_run_is_valid_and_gives_the_server_back(mock: Callable[..., str], tmp_path: Path) -> None:
    url = mock(*QUICK)
    async with client_of(url) as client:
        before = (await client.get_json("/settings"))["settings"]
        report = await run(url, tmp_path / "j")
        assert (await client.get_json("/settings"))["settings"] == before
        seen = await client.get_json("/seen?detail=1")
    assert [row.invalid for row in report.rows] == [None] * 10
    assert len(report.trials) == 10
    assert len({trial.cache_salt for trial in report.trials}) == 10
    assert all(row.same_texts in (None, (3, 3), (8, 8)) for row in report.rows)
    cold = next(row for row in report.rows if (row.stage, row.concurrency) == ("0", 4))
    batched = next(row for row in report.rows if (row.stage, row.concurrency) == ("2", 4))
    assert cold.hit_rate is not None
    assert cold.hit_rate.median == 0
    assert batched.hit_rate is not None
    assert batched.hit_rate.median > 80
    measured = [row for row in seen["detail"] if row["completion_tokens"] == 5]
    assert len(measured) == 5 * (3 + 8)


async def test_the_raw_draft_has_rows_of_its_own_and_leaves_the_others_alone(
    mock: Callable[..., str], tmp_path: Path
) -> None:
    plan = replace(SMALL, raw_draft="short")
    async with client_of(mock(*QUICK)) as client:
        report = await run_stages(
            client, plan, prompts.load(), Journal(tmp_path / "j"), raw_draft=tmp_path / "raw"
        )
        settings = (await client.get_json("/settings"))["settings"]
    rows = {(row.stage, row.concurrency): row for row in report.rows}
    raw = [cell for cell in rows if cell[0].startswith("3r")]
    assert raw == [("3r γ5", 1), ("3r γ8", 1), ("3r auto", 1)]
    assert [row.invalid for row in report.rows] == [None] * 13
    assert rows["3r γ5", 1].acceptance is not None
    assert "one trial of one request" in rows["3r γ8", 1].note
    assert rows["3r auto", 1].note.startswith("drafts are accepted too rarely to pay")
    drafts = {
        (t.stage, t.settings["draft"], t.settings["num_speculative_tokens"])
        for t in report.trials
        if t.stage.startswith("3")
    }
    folder = str(tmp_path / "raw")
    assert drafts == {
        ("3", None, None),
        ("3a", None, None),
        ("3r γ5", folder, 5),
        ("3r γ8", folder, 8),
        ("3r auto", folder, 5),
    }
    assert (settings["draft"], settings["num_speculative_tokens"]) == (None, None)
    full = replace(plan, raw_draft="full", repeats=3).order(report.stages)
    assert len(full) == 3 * 8 * 2


async def test_a_server_that_only_pretends_is_found_out(mock: Callable[..., str], tmp_path: Path) -> None:
    report = await run(mock(*QUICK, "--deaf"), tmp_path / "j")
    invalid = {(row.stage, row.concurrency): row.invalid for row in report.rows}
    assert "the cache should be off, but" in (invalid["0", 4] or "")
    assert "answers were growing at once" in (invalid["1", 4] or "")
    assert invalid["3", 1] == "speculation is always on, but nothing was drafted"
    assert invalid["2", 4] is None


class Interrupted(Exception):
    pass


async def test_an_interrupted_run_goes_on(mock: Callable[..., str], tmp_path: Path) -> None:
    url, path = mock(*QUICK), tmp_path / "deep" / "journal"
    finished: list[TrialResult] = []

    def stop_after_four(trial: TrialResult) -> None:
        finished.append(trial)
        if len(finished) == 4:
            raise Interrupted

    with pytest.raises(Interrupted):
        await run(url, path, done=stop_after_four)
    with path.open("ab") as file:  # killed while it wrote the next line
        file.write(b'{"stage":"0","concurr')
    begun: list[tuple[str, int]] = []
    report = await run(url, path, begins=lambda stage, users, repeat: begun.append((stage.key, users)))
    assert report.resumed == 4
    assert len(report.trials) == 10
    assert len(begun) == 6
    assert not set(begun) & {(trial.stage, trial.concurrency) for trial in finished}
    assert [trial.cache_salt for trial in report.trials[:4]] == [trial.cache_salt for trial in finished]
    assert len(Journal(path).read()) == 10


async def test_a_failing_server_makes_its_stage_invalid(mock: Callable[..., str], tmp_path: Path) -> None:
    report = await run(mock(*QUICK, "--die-after", "2"), tmp_path / "j")
    assert all(
        "requests failed: the stream ended without [DONE]" in (row.invalid or "") for row in report.rows
    )
    assert all(row.ttft_p50 is None for row in report.rows)


async def test_a_server_without_dev_mode_is_refused_clearly() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConfigError, match="--dev-mode"):
            await run(url, Path("unused"))


def shuffled(keys: Sequence[str], seed: int) -> list[str]:
    order = list(keys)
    random.Random(seed).shuffle(order)
    return order


def test_rows_do_not_depend_on_the_order_of_trials() -> None:
    every: list[Stage] = list(ALL.values())
    results = {key: result(key) for key in ALL}
    rows = summarise(every, list(results.values()))
    assert rows == summarise(every, [results[key] for key in shuffled(list(ALL), 3)])
