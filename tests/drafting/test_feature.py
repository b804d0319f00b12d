"""A feature draft in training: its chains are what the engine drafts, it learns, and a stop costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firsttoken.drafting.acceptance import acceptance
from firsttoken.drafting.feature import ChainConfig, FeatureLearner, chain_hits, draw_anchors
from firsttoken.drafting.states import target_states
from firsttoken.drafting.train import TrainConfig, Trainer
from firsttoken.engine import SamplingParams
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from tests.drafting.tiny import tiny_corpus
from tests.engine.tiny import VOCAB, tiny_model
from tests.speculate.test_feature import drafted_by_the_book
from tests.speculate.tiny_draft import tiny_draft

CAPTURE = FeatureConfig.for_target(tiny_model().config, draft_vocab_size=VOCAB).capture


def learner(seed=0):
    target = tiny_model()
    corpus = tiny_corpus()
    states = target_states(target, corpus, CAPTURE)
    config = FeatureConfig.for_target(target.config, draft_vocab_size=40, intermediate_size=64)
    draft = FeatureDraft(config, target, corpus.frequent_tokens(40))
    start_from_target(draft, target, seed)
    return FeatureLearner(draft, target, states, states, ChainConfig(rows=4, anchors=12, depth=3))


def test_hits_are_those_of_drafting_without_any_cache():
    corpus = tiny_corpus()
    states = target_states(tiny_model(), corpus, CAPTURE)
    hits, counts = chain_hits(tiny_draft(tiny_model()), states, 3)
    greedy = SamplingParams(temperature=0)
    for row, anchor in [(0, 9), (1, 17), (3, 30), (6, 41)]:
        tokens = corpus.tokens[row].tolist()
        drafts = drafted_by_the_book(tokens[: anchor + 1], 0, 3, greedy)
        run = True
        for j in range(3):
            counted = bool(corpus.answers[row, anchor + 1 : anchor + 2 + j].all())
            assert bool(counts[row, anchor, j]) == counted
            # Later steps are fed the text; they can be compared while the draft is the text.
            if run and counted:
                assert bool(hits[row, anchor, j]) == (drafts[j] == tokens[anchor + 1 + j])
                run = drafts[j] == tokens[anchor + 1 + j]


def test_anchors_are_slots_before_an_answers_token():
    answers = tiny_corpus().answers
    anchors = draw_anchors(answers, 10, torch.Generator().manual_seed(0))
    assert anchors.shape == (len(answers), 10)
    for row, slots in zip(answers, anchors, strict=True):
        usable = [p for p in range(1, len(row) - 1) if row[p + 1]]
        assert len(usable) >= 10
        assert len(set(slots.tolist())) == 10
        assert set(slots.tolist()) <= set(usable)


def test_training_makes_the_draft_better():
    one = learner()
    before = acceptance(*chain_hits(one.draft, one.states, 3)).tokens_per_cycle[2]
    losses = []
    trainer = Trainer(one, TrainConfig(steps=60, rate=3e-3, muon=True), torch.device("cpu"))
    trainer.run(on_step=lambda step, loss: losses.append(loss), every=10)
    assert losses[-1] < losses[0]
    assert one.figures().tokens_per_cycle[2] > before


@pytest.mark.parametrize("muon", [False, True])
def test_a_stopped_training_ends_with_the_same_weights(tmp_path, muon):
    config = TrainConfig(steps=7, seed=3, muon=muon)
    through = learner()
    Trainer(through, config, torch.device("cpu")).run()
    stopped = learner()
    trainer = Trainer(stopped, config, torch.device("cpu"))
    trainer.run(3)
    trainer.save(tmp_path / "state.pt")
    resumed = learner(seed=9)  # start values that restoring must replace
    trainer = Trainer(resumed, config, torch.device("cpu"))
    assert trainer.restore(tmp_path / "state.pt")
    assert trainer.step == 3
    trainer.run()
    for name, weight in through.draft.named_weights().items():
        assert torch.equal(weight, resumed.draft.named_weights()[name]), name
    for other in (TrainConfig(steps=8), replace(config, what="another model, corpus or shape")):
        assert not Trainer(learner(), other, torch.device("cpu")).restore(tmp_path / "state.pt")


def test_tokens_per_cycle_by_hand():
    # One answer of tokens 1 … 6 behind slot 0's token; drafts from slot 1: right, right, wrong; from 4: wrong.
    counts = torch.zeros((1, 8, 3), dtype=torch.bool)
    hits = torch.zeros_like(counts)
    for slot in range(1, 6):
        for j in range(3):
            counts[0, slot, j] = slot + 1 + j <= 6
    hits[0, 1] = torch.tensor([True, True, False])
    figures = acceptance(hits, counts)
    # γ 3: slot 1 brings tokens 2, 3 and 4; slot 4 brings 5; slot 5 brings 6.
    assert figures.tokens_per_cycle[2] == pytest.approx(5 / 3)
    # γ 1: tokens 2 and 3; then one each.
    assert figures.tokens_per_cycle[0] == pytest.approx(5 / 4)
    assert figures.per_position[0] == pytest.approx(1 / 5)
    assert figures.per_position[1:] == [1.0, 0.0]
