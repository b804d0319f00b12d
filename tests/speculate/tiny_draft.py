"""Drafts of every kind on the tiny float64 models of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.runner import Runner
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.decoder_drafter import SeparateDrafter, ShallowDrafter
from firsttoken.speculate.drafter import Drafter
from firsttoken.speculate.feature import FeatureDrafter
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from firsttoken.speculate.ngram import NgramDrafter
from firsttoken.speculate.shallow_draft import ShallowConfig, shallow_decoder
from firsttoken.speculate.speculator import Speculator
from tests.engine.tiny import VOCAB

SHORT_HEAD = torch.tensor([t for t in range(VOCAB) if t % 6 != 5])


@cache
def tiny_draft(model: Decoder) -> FeatureDraft:
    """Untrained: a copy of the target's last layer behind its last stream, which is right now and then."""
    config = FeatureConfig.for_target(model.config, draft_vocab_size=VOCAB - 8)
    draft = FeatureDraft(config, model, SHORT_HEAD)
    start_from_target(draft, model, seed=1)
    draft.prepare()
    return draft


@cache
def tiny_shallow(model: Decoder) -> Decoder:
    """The target's first layer, shared, and its last one, a little changed."""
    config = ShallowConfig(shared_layers=1, tuned_layers=1, draft_vocab_size=len(SHORT_HEAD))
    draft = shallow_decoder(model, config, SHORT_HEAD)
    tuned = draft.layers[1]
    generator = torch.Generator().manual_seed(2)
    for linear in (tuned.qkv, tuned.o, tuned.gate_up, tuned.down):
        noise = torch.randn(linear.weight.shape, generator=generator, dtype=torch.float64)
        linear.weight += 0.2 * noise * linear.weight.shape[1] ** -0.5
    for norm in (tuned.input_norm, tuned.post_norm, draft.norm):
        norm.prepare()
    return draft


@cache
def tiny_separate(model: Decoder) -> Decoder:
    """The target's weights a little changed, with rows of padding: another checkpoint of the same tokens."""
    config = replace(model.config, vocab_size=VOCAB + 4)
    draft = Decoder.random(config, torch.float64, torch.device("cpu"), seed=5)
    theirs = model.named_weights()
    for name, weight in draft.named_weights().items():
        rows = min(len(weight), len(theirs[name]))
        weight[:rows].mul_(0.2).add_(theirs[name][:rows])
    for layer in draft.layers:
        layer.input_norm.prepare()
        layer.post_norm.prepare()
    draft.norm.prepare()
    return draft


def tiny_drafter(kind: str, runner: Runner) -> Drafter:
    model, cache = runner.model, runner.cache
    layers = model.config.num_layers
    if kind == "ngram":
        return NgramDrafter(min_n=1)
    if kind == "feature":
        return FeatureDrafter(
            tiny_draft(model),
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_layers=layers,
            name="tiny",
        )
    if kind == "shallow":
        return ShallowDrafter(
            tiny_shallow(model), cache, SHORT_HEAD, shared=1, num_layers=layers, name="tiny"
        )
    return SeparateDrafter(tiny_separate(model), cache, vocab_size=VOCAB, num_layers=layers, name="tiny")


def drafter_factory(kind: str, gamma: int, *, always: bool = True) -> Callable[..., Speculator]:
    def make(config: Any, costs: Any, runner: Runner) -> Speculator:
        return Speculator(tiny_drafter(kind, runner), costs, gamma=gamma, always=always)

    return make


class Recorded:
    """A speculator that keeps what it drafted, by the request and its tokens so far."""

    def __init__(self, inner: Speculator, kept: dict[tuple[str, tuple[int, ...]], list[int]]) -> None:
        self.inner, self.kept = inner, kept

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts = self.inner.propose(seqs, budget)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft:
                self.kept[seq.request.request_id, tuple(seq.token_ids)] = draft
        return drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
