"""What decides whether drafts are made: rates learned from outcomes, and times that were measured."""

from __future__ import annotations

import pytest

from firsttoken.engine.costs import CostModel
from firsttoken.speculate.policy import Acceptance, Calibration, MeasuredGain, choose_gamma


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


def test_the_gain_follows_a_text_that_changes():
    gain = MeasuredGain(CostModel([(1, 0.010)]))
    for _ in range(100):
        gain.observe(1, 4, 0.014)
    assert gain.speedup(1) > 2
    for _ in range(100):
        gain.observe(1, 1, 0.014)
    assert gain.speedup(1) < 1


def test_gamma_is_nought_where_nothing_is_won():
    costs = CostModel([(1, 0.010), (2, 0.012), (8, 0.021)])
    acceptance = Acceptance(5)
    for _ in range(200):
        acceptance.observe(5, 0)
    assert choose_gamma(acceptance, costs, [5]).gamma == 0
    for _ in range(2000):
        acceptance.observe(5, 5)
    assert choose_gamma(acceptance, costs, [5]).gamma == 5
