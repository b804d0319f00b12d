"""Whether drafts are made: by acceptance and times that are given here, not measured."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from firsttoken.engine.costs import CostModel
from firsttoken.engine.request import Request, SamplingParams
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.speculator import Speculator

PLAIN = 0.020


class Offering:
    """A drafter whose drafts cost `share` of a step each and say nothing of their chances."""

    name = "separate draft raw"
    capture = ()
    lookahead = 1

    def __init__(self, share: float) -> None:
        self.step_share = share
        self.ready = 10**6

    def offers(self, seqs: list[Any], rooms: list[int]) -> list[int]:
        return [min(room, self.ready) for room in rooms]

    def catch_up(self, seqs: list[Any]) -> None:
        pass

    def draft(self, seqs: list[Any], counts: list[int], judge: Any) -> list[list[int]]:
        judge.took(max(counts), max(counts) * self.step_share * PLAIN)
        return [[1] * n for n in counts]

    def computed(self, items: list[Any], *, work: bool) -> None:
        self.work = work

    def forget(self, seq: Any) -> None:
        pass


def sequence() -> Sequence:
    request = Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=10**6))
    return Sequence(request=request, token_ids=[1, 1], num_prompt_tokens=1, noise_seed=0, arrival=0.0)


def served(speculator: Speculator, steps: int, stand: int, share: float) -> list[int]:
    """Serves one sequence; every draft's first `stand` tokens stand. Drafted tokens by step."""
    seq, drafted = sequence(), []
    for _ in range(steps):
        (draft,) = speculator.propose([seq], 100)
        drafted.append(len(draft))
        if draft:
            speculator.observe(seq, draft, min(stand, len(draft)))
        rows = len(draft)
        # The drafting's own time is what `propose` took; it is in the verification's here, to be deterministic.
        speculator.observe_step(1 + rows, PLAIN * (1 + 0.02 * rows + share * rows))
        speculator.computed([], prompts_wait=False)
    return drafted


def costs() -> CostModel:
    return CostModel([(1, PLAIN), (11, PLAIN * 1.2)])


def test_a_raw_draft_is_turned_off_and_the_reason_is_told(caplog):
    share = 8 / 30
    speculator = Speculator(Offering(share), costs(), gamma=None, always=False)
    with caplog.at_level(logging.WARNING):
        drafted = served(speculator, 400, stand=0, share=share)
    assert sum(n > 0 for n in drafted[:18]) == 3, "it was given a try, and spared the rest of it"
    assert sum(n > 0 for n in drafted[50:]) <= 3 * 4, "then it is only looked at now and then"
    assert max(drafted[50:]) == 1, "and cheaply"
    told = speculator.describe()
    assert (told["active"], told["gamma"], told["verdict"]) == (False, 0, "too slow")
    assert told["acceptance_rate"] == 0
    assert told["pays_above"] > told["tokens_per_cycle"] == pytest.approx(1)
    assert told["speedup"] < 1
    assert "not drafting: 0% of the drafts stand" in told["reason"]
    assert "not drafting" in caplog.text
    assert "separate draft raw" in caplog.text
    assert speculator.lookahead == 0
    assert not speculator.drafter.work, "a draft that is off does not read prompts"


def test_a_good_draft_stays_on_and_plain_steps_go_on_being_measured():
    speculator = Speculator(Offering(0.06), costs(), gamma=None, always=False)
    drafted = served(speculator, 400, stand=8, share=0.06)
    assert sum(n == 0 for n in drafted) <= 2 + 2 * 4
    assert any(n == 0 for n in drafted[100:])
    assert max(drafted) == drafted[-1] == 8, "as far as it goes"
    told = speculator.describe()
    assert (told["active"], told["gamma"], told["verdict"]) == (True, 8, "pays")
    assert told["speedup"] > 3
    assert speculator.lookahead == 8


def test_gamma_is_as_far_as_drafts_stand():
    speculator = Speculator(Offering(0.1), costs(), gamma=None, always=False)
    drafted = served(speculator, 300, stand=2, share=0.1)
    assert {n for n in drafted[100:] if n} == {2}


def test_a_given_number_is_the_most_and_always_is_always():
    speculator = Speculator(Offering(0.06), costs(), gamma=3, always=False)
    assert max(served(speculator, 100, stand=8, share=0.06)) == 3
    speculator = Speculator(Offering(1.0), costs(), gamma=4, always=True)
    assert set(served(speculator, 50, stand=0, share=1.0)) == {4}
    assert speculator.describe()["verdict"] == "always"
