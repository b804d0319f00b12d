"""Feature drafts on the tiny float64 models of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from firsttoken.engine.engine import Computed
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.runner import Runner
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.feature import FeatureSpeculator
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from tests.engine.tiny import VOCAB


@cache
def tiny_draft(model: Decoder) -> FeatureDraft:
    """Untrained: a copy of the target's last layer behind its last stream, which is right now and then."""
    config = FeatureConfig.for_target(model.config, draft_vocab_size=VOCAB - 8)
    ids = torch.tensor([t for t in range(VOCAB) if t % 6 != 5])
    draft = FeatureDraft(config, model, ids)
    start_from_target(draft, model, seed=1)
    draft.prepare()
    return draft


def feature_factory(gamma: int, *, always: bool = True) -> Callable[..., FeatureSpeculator]:
    def make(config: Any, costs: Any, runner: Runner) -> FeatureSpeculator:
        return FeatureSpeculator(
            tiny_draft(runner.model),
            costs,
            num_blocks=runner.cache.num_blocks,
            block_size=runner.cache.block_size,
            max_gamma=gamma,
            always=always,
            name="tiny",
        )

    return make


class Recorded:
    """A speculator that keeps what it drafted, by the request and its tokens so far."""

    def __init__(self, inner: FeatureSpeculator, kept: dict[tuple[str, tuple[int, ...]], list[int]]) -> None:
        self.inner, self.kept = inner, kept
        self.capture = inner.capture

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts = self.inner.propose(seqs, budget)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft:
                self.kept[seq.request.request_id, tuple(seq.token_ids)] = draft
        return drafts

    def computed(self, items: list[Computed]) -> None:
        self.inner.computed(items)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
