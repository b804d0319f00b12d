"""Measuring a draft changes no text, and its figures are what was counted."""

from __future__ import annotations

import pytest

from firsttoken.drafting.measure import DraftMeter, SpeedRow, best_gamma, expected_tokens
from firsttoken.engine.config import EngineConfig
from firsttoken.speculate.select import make_speculator
from tests.drafting.folder import write_chat_model

PROMPTS = {"loops": [[5, 6, 7, 8] * 6, [9, 10, 11] * 7], "other": [[40, 41, 42, 43, 44, 40, 41]]}


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    folder = write_chat_model(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory="8MiB")
    return DraftMeter(config, "ngram", make_speculator, max_tokens=24)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_the_same_with_every_kind_of_draft(meter, temperature):
    texts = PROMPTS["loops"]
    plain = meter.run(texts, 0, temperature=temperature)
    assert plain.cycles == 0
    assert sum(plain.drafted) == 0
    assert plain.tokens == sum(map(len, plain.texts)) - len(texts)  # all but the first of each
    for argmax in (False, True):
        for batch in (1, 2):
            run = meter.run(texts, 3, temperature=temperature, batch=batch, argmax=argmax)
            assert run.texts == plain.texts
    assert meter.engine.stats()["num_running"] == 0


def test_figures_are_what_was_counted(meter):
    run = meter.run([*PROMPTS["loops"], *PROMPTS["other"]], 3)
    assert run.cycles > 0
    assert run.tokens_per_cycle == 1 + sum(run.accepted) / run.cycles
    assert run.per_position[0] == run.accepted[0] / run.cycles
    assert run.accepted == sorted(run.accepted, reverse=True)  # a draft stands only if those before it do
    rows = meter.acceptance(PROMPTS, gamma=3, temperatures=(0.0, 0.7))
    assert [(r.category, r.temperature, r.draws) for r in rows] == [
        ("loops", 0.0, "noise"),
        ("other", 0.0, "noise"),
        ("loops", 0.7, "noise"),
        ("loops", 0.7, "argmax"),
        ("other", 0.7, "noise"),
        ("other", 0.7, "argmax"),
    ]
    speeds = meter.speed(PROMPTS, gammas=(1, 2, 4), batches=(1, 2))
    assert [(r.batch, r.gamma) for r in speeds] == [(b, g) for b in (1, 2) for g in (1, 2, 4)]
    for batch in (1, 2):
        tokens = [r.tokens_per_cycle for r in speeds if r.batch == batch]
        assert 1 <= tokens[0] <= tokens[1] <= tokens[2] <= 5


def test_expected_tokens_by_hand():
    assert expected_tokens([0.5, 0.5, 1.0], 3) == 1 + 0.5 + 0.25 + 0.25
    assert expected_tokens([0.5, 0.5], 5) == 1.75
    assert expected_tokens([0.9], 0) == 1


def rows(**measured: float) -> list[SpeedRow]:
    return [
        SpeedRow(batch=1, gamma=int(name[1:]), tokens_per_cycle=1.0, predicted=1.0, measured=value)
        for name, value in measured.items()
    ]


def test_the_smallest_of_equally_fast_gammas_is_used_and_none_that_is_not_faster():
    assert best_gamma(rows(g1=1.3, g3=1.6, g5=1.61), 1) == 3
    assert best_gamma(rows(g1=0.9, g5=1.015), 1) == 0
    assert best_gamma(rows(g1=2.0), 4) == 0
