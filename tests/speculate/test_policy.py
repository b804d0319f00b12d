"""What decides whether drafts are made: rates learned from outcomes, and times that were measured."""

from __future__ import annotations

import itertools
import math

import pytest

from firsttoken.engine.costs import CostModel
from firsttoken.speculate.policy import (
    Acceptance,
    Calibration,
    Choice,
    MeasuredGain,
    Retries,
    StepTimes,
    choose_gamma,
)


def test_a_calibration_learns_what_a_probability_is_worth():
    calibration = Calibration()
    for i in range(400):
        calibration.observe(0.35, i % 10 < 6)
    assert calibration.rate(0.31) == pytest.approx(0.6, abs=0.03)
    assert calibration.rate(0.95) > 0.9  # another bin keeps its prior
    assert calibration.rate(1.0) <= 1


def test_the_gain_is_tokens_per_second_over_plain_steps():
    costs = CostModel([(1, 0.010), (8, 0.012)])
    gain = MeasuredGain(costs)
    assert gain.speedup(1) == 1
    for _ in range(50):
        gain.observe(1, 3, 0.015)
    assert gain.speedup(1) == pytest.approx(3 / 0.015 * 0.010)
    assert gain.tokens_per_cycle(1) == pytest.approx(3)
    assert gain.pays_above(1) == pytest.approx(1.5)
    assert gain.speedup(4) == 1, "other batch sizes are measured for themselves"


def test_a_cycle_is_never_taken_to_be_faster_than_a_plain_step():
    gain = MeasuredGain(CostModel([(1, 0.010)]))
    for _ in range(5):
        gain.observe_plain(1, 0.050)  # the machine was busy with something else
        gain.observe(1, 1, 0.014)
    assert gain.speedup(1) == 1


def test_the_gain_follows_a_text_that_changes():
    gain = MeasuredGain(CostModel([(1, 0.010)]))
    for _ in range(100):
        gain.observe(1, 4, 0.014)
    assert gain.speedup(1) > 2
    for _ in range(100):
        gain.observe(1, 1, 0.014)
    assert gain.speedup(1) < 1


def test_gamma_follows_acceptance_and_costs():
    def best(acceptance: Acceptance, step: float, row: float, lengths: list[int], count: int = 1) -> Choice:
        return choose_gamma(
            acceptance,
            lengths,
            count=count,
            plain_seconds=0.010,
            step_seconds=step,
            row_seconds=lambda rows: row * rows,
        )

    acceptance = Acceptance(8)
    for _ in range(200):
        acceptance.observe(8, 0)
    assert best(acceptance, 0.001, 0.0005, [8]).speedup < 1
    for _ in range(2000):
        acceptance.observe(8, 8)
    assert best(acceptance, 0.001, 0.0005, [8]).gamma == 8
    assert best(acceptance, 0.001, 0.0005, [3]).gamma == 3, "no more than is offered"
    assert best(acceptance, 0.011, 0.0005, [8]).speedup < 1, "a draft as dear as the model never pays"
    half = Acceptance(8)
    for i in range(2000):
        half.observe(8, (0, 1, 0, 2, 0, 1, 0, 8)[i % 8])
    # Two sequences' rows, of which one can be drafted for: 1 + 0.5 + 0.25 … tokens, each dearer than the last.
    choice = best(half, 0.001, 0.0005, [8, 0][:1], count=2)
    assert 1 <= choice.gamma <= 3
    assert choice.speedup == pytest.approx(
        (2 + sum(math.prod(half.rates()[: i + 1]) for i in range(choice.gamma)))
        / (0.010 + 0.0015 * choice.gamma)
        * 0.010
        / 2
    )


def test_a_position_never_seen_is_taken_to_be_like_the_one_before():
    acceptance = Acceptance(4)
    for _ in range(500):
        acceptance.observe(2, 2)
    rates = acceptance.rates()
    assert rates[2] == rates[3] == pytest.approx(rates[1])
    assert rates[1] > 0.98


def test_a_drafting_step_costs_its_share_until_it_is_measured():
    times = StepTimes(0.25, CostModel([(1, 0.020), (8, 0.020)]))
    assert times.seconds(1) == pytest.approx(0.005)
    for _ in range(100):
        times.observe(1, 0.003)
    assert times.seconds(1) == pytest.approx(0.003, rel=0.01)
    assert times.seconds(4) == times.seconds(1), "the nearest batch size that is known"


def test_a_draft_that_was_turned_off_is_tried_again_soon_then_rarely() -> None:
    retries = Retries()
    tried = [step for step in range(1, 1500) if retries.due(1)]
    gaps = [b - a for a, b in itertools.pairwise([0, *tried])]
    assert gaps == [16, 32, 64, 128, 256, 256, 256, 256][: len(gaps)]
    assert len(gaps) >= 6
    assert not retries.soon(1)
    retries.paid(1)
    assert [step for step in range(1, 50) if retries.due(1)] == [16, 48]
    assert not retries.soon(8), "each batch size has its own"


def test_a_new_try_can_change_the_verdict() -> None:
    gain = MeasuredGain(CostModel([(1, 0.010), (8, 0.012)]), 0.05)
    gain.observe_plain(1, 0.020)
    for _ in range(500):
        gain.observe(1, tokens=1, seconds=0.025)
    assert gain.speedup(1) < 1
    gain.forget(1, 4)
    for _ in range(4):
        gain.observe(1, tokens=4, seconds=0.025)
    assert gain.speedup(1) > 1.5
