"""The prompt set: enough, disjoint from its warm-up, and picked the same way every time."""

from __future__ import annotations

import pytest

from firsttoken.bench.prompts import load


def test_the_set() -> None:
    prompts = load()
    turns = [prompt.turn for prompt in prompts.measured]
    assert len(turns) >= 32
    assert len(set(turns)) == len(turns)
    assert {prompt.category for prompt in prompts.measured} == {"chat", "code", "creative", "chinese"}
    assert len({prompt.name for prompt in prompts.measured}) == len(turns)
    assert {prompt.system for prompt in prompts.measured} == {prompts.system}
    assert any("\u4e00" <= character <= "\u9fff" for turn in turns for character in turn)
    assert 400 <= len(prompts.system.split()) <= 560  # about 640 tokens


def test_warm_up_shares_nothing_with_what_is_measured() -> None:
    prompts = load()
    measured = {prompt.turn for prompt in prompts.measured}
    assert not measured & {prompt.turn for prompt in prompts.warmup}
    for prompt in prompts.warmup:
        assert prompt.system[:20] != prompts.system[:20]  # not even a first block in common


@pytest.mark.parametrize("count", [1, 6, 32, 70])
def test_picking_depends_on_the_seed_alone(count: int) -> None:
    prompts = load()
    assert prompts.pick(count, 5) == prompts.pick(count, 5)
    assert len(prompts.pick(count, 5)) == count


def test_picking_mixes_categories_and_seeds_differ() -> None:
    prompts = load()
    assert {prompt.category for prompt in prompts.pick(4, 1)} == {"chat", "code", "creative", "chinese"}
    assert prompts.pick(8, 1) != prompts.pick(8, 2)
    assert len(set(prompts.pick(32, 0))) == 32  # no repeats before the set is used up
