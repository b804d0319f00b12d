"""The glossary: formulas on hand-made records, percentiles against numpy, no value instead of zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.bench import metrics
from firsttoken.bench.client import ClientHealth, Record
from firsttoken.bench.load import Trial
from firsttoken.bench.metrics import METRICS, goodput, percentile, spread

finite = st.floats(-1e6, 1e6)


def record(**changes: object) -> Record:
    given = {
        "intended": 1.0,
        "sent": 1.1,
        "first_byte": 0.2,
        "chunks": [(0.3, "a"), (0.4, "bc"), (0.7, "d")],
        "first_visible": 0.4,
        "ended": 0.75,
        "status": 200,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "completion_tokens": 5,
    }
    return Record(**(given | changes))  # type: ignore[arg-type]


def trial(*records: Record, **counters: float) -> Trial:
    return Trial(records=list(records), wall=2.0, health=ClientHealth(), counters=counters)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttfb", 200),
        ("ttft", 300),
        ("ttft_intended", 400),
        ("ttfvt", 400),
        ("tpot", 100),  # 400 ms for the 4 tokens after the first, though they came in 2 chunks
        ("icl_max", 300),
        ("tokens_per_chunk", 5 / 3),
        ("duration", 750),
    ],
)
def test_request_metrics(key: str, value: float) -> None:
    assert METRICS[key](record()) == pytest.approx(value)


@pytest.mark.parametrize("key", ["ttft", "ttft_intended", "ttfvt", "tpot", "tokens_per_chunk", "duration"])
def test_a_failed_request_has_no_value(key: str) -> None:
    assert METRICS[key](record(error="died")) is None


def test_one_token_has_no_tpot() -> None:
    assert metrics.tpot(record(completion_tokens=1, chunks=[(0.3, "a")])) is None


def test_trial_metrics() -> None:
    two = trial(
        record(), record(cached_tokens=0), drafts=10, drafted=50, accepted=5, cpu_seconds=3.0, cores=2
    )
    assert metrics.output_rate(two) == 5
    assert metrics.hit_rate(two) == 32
    assert metrics.acceptance_rate(two) == 10
    assert metrics.acceptance_length(two) == 1.5
    assert metrics.utilisation(two) == 75
    assert metrics.utilisation(trial(gpu_percent=40.0, cpu_seconds=1.0, cores=2)) == 40


def test_missing_is_none_and_not_zero() -> None:
    assert metrics.output_rate(trial(record(completion_tokens=None))) is None
    assert metrics.output_rate(trial()) is None
    assert metrics.hit_rate(trial(record(cached_tokens=None))) is None
    assert metrics.hit_rate(trial(record(cached_tokens=0))) == 0  # a zero that was said
    assert metrics.acceptance_rate(trial(record(), drafted=0, accepted=0)) is None
    assert metrics.acceptance_length(trial(record())) is None
    assert metrics.utilisation(trial(record())) is None


def test_goodput_needs_all_limits() -> None:
    records = [
        record(),
        record(error="x"),
        record(chunks=[(0.9, "a"), (1.0, "b")]),
        record(completion_tokens=None),
        record(completion_tokens=1),
    ]
    assert goodput(records, wall=2.0, limits={"ttft": 500}) == 1.5
    assert goodput(records, wall=2.0, limits={"ttft": 500, "tpot": 150}) == 1.0  # one token cannot miss TPOT
    assert goodput(records, wall=2.0, limits={"ttft_intended": 399}) == 0
    assert goodput(records, wall=0.0, limits={}) is None


def test_every_metric_says_its_formula() -> None:
    for metric in METRICS.values():
        assert metric.function.__doc__ is not None
        assert metric.function.__doc__.startswith("Formula: ")
        assert metric.formula
        assert metric.unit in ("ms", "tok/s", "tokens", "%")


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(st.lists(finite, min_size=1, max_size=9), finite)
def test_spread_moves_with_the_values(values: list[float], shift: float) -> None:
    before, after = spread(values), spread([value + shift for value in values])
    assert before is not None
    assert after is not None
    assert after.median == pytest.approx(before.median + shift, abs=1e-6)
    assert after.mad == pytest.approx(before.mad, abs=1e-6)
    assert before.n == len(values)


def test_one_odd_repeat_moves_neither() -> None:
    value = spread([10.0, 11.0, 12.0, 11.5, 900.0])
    assert value is not None
    assert (value.median, value.mad) == (11.5, 0.5)


def test_percentile_and_spread_of_nothing() -> None:
    assert percentile([], 50) is None
    assert percentile([None, None], 50) is None
    assert spread([None]) is None
    assert percentile([None, 3.0], 99) == 3.0
