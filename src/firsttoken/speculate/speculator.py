"""Drafter + policy: what the engine asks for drafts, and the words for why there are some or none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.engine import Computed
from firsttoken.engine.runner import Runner
from firsttoken.engine.sequence import Sequence
from firsttoken.models import fingerprint
from firsttoken.speculate.draft_folder import load_feature_draft
from firsttoken.speculate.feature import FeatureSpeculator
from firsttoken.speculate.find import own_draft, trained_for
from firsttoken.speculate.ngram import NgramDrafter
from firsttoken.speculate.policy import Acceptance, Choice, MeasuredGain, choose_gamma

_log = logging.getLogger(__name__)

_DEFAULT_GAMMA = 5
_PROBE_EVERY = 32
"""With drafts unprofitable, every so many steps that had one to offer a step drafts anyway: texts change."""
_ADVANTAGE = 1.02
"""`auto` drafts only above this speed-up, predicted or measured: below, the error of either decides."""
_TRIES = 8
"""Verifications at a batch size after which what was measured there overrules the prediction."""


class Speculator:
    """Implements `engine.engine.Speculator` for drafters on the host."""

    capture: tuple[int, ...] = ()

    def __init__(self, drafter: NgramDrafter, costs: CostModel, *, max_gamma: int, always: bool) -> None:
        self.drafter = drafter
        self.max_gamma = max_gamma
        self._costs = costs
        self._always = always
        self._acceptance = Acceptance(max_gamma)
        self._choice = Choice(0, 0.0, 0)
        self._gain = MeasuredGain(costs)
        self._unprofitable = 0
        self._drafted = self._accepted = 0
        self._count = 1
        """Sequences in the step that runs now; whether it drafts, and how many of its drafts stood:"""
        self._drafting = False
        self._stood = 0

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts = [self._offer(seq) for seq in seqs]
        lengths = [len(d) for d in drafts]
        self._count, self._drafting, self._stood = len(seqs), False, 0
        if not any(lengths):
            return drafts
        gamma = self._gamma(lengths)
        self._drafting = gamma > 0
        cut: list[list[int]] = []
        for draft in drafts:
            kept = draft[: min(gamma, budget)]
            budget -= len(kept)
            cut.append(kept)
        return cut

    def observe(self, seq: Sequence, drafts: list[int], num_accepted: int) -> None:
        self._acceptance.observe(len(drafts), num_accepted)
        self._drafted += len(drafts)
        self._accepted += num_accepted
        self._stood += num_accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if self._drafting:
            self._gain.observe(self._count, self._count + self._stood, seconds)
        elif num_tokens:
            self._gain.observe_plain(num_tokens, seconds)

    def computed(self, items: list[Computed]) -> None:
        """Never called: no layer is captured."""

    def forget(self, seq: Sequence) -> None:
        self.drafter.forget(seq)

    def describe(self) -> dict[str, Any]:
        choice, seen = self._choice, self._acceptance.num_observed
        rate = self._accepted / self._drafted if self._drafted else None
        if self._always:
            reason = f"always on, γ {self.max_gamma}"
        elif not seen:
            reason = "nothing drafted yet"
        else:
            expected = self._acceptance.expected_tokens(max(choice.best_gamma, 1))
            verdict = "drafting pays" if choice.gamma else "not drafting"
            reason = (
                f"{verdict}: {expected:.2f} tokens expected per step at γ {max(choice.best_gamma, 1)},"
                f" speed-up {choice.speedup:.2f}"
            )
        return {
            "active": self._always or choice.gamma > 0,
            "drafter": "ngram",
            "gamma": self.max_gamma if self._always else choice.gamma,
            "acceptance_rate": rate,
            "predicted_speedup": choice.speedup or None,
            "reason": reason,
        }

    def _offer(self, seq: Sequence) -> list[int]:
        """The drafter's best offer for one sequence; never past the end of its answer."""
        room = seq.request.sampling.max_tokens - seq.num_output_tokens - 1
        count = min(self.max_gamma, room)
        if count <= 0 or not seq.request.speculate:
            return []
        return self.drafter.propose(seq, count)

    def _gamma(self, lengths: list[int]) -> int:
        if self._always:
            return self.max_gamma
        choice = choose_gamma(self._acceptance, self._costs, lengths)
        if self._gain.cycles(len(lengths)) >= _TRIES:
            # What a step of this many rows costs depends on more than their number; here it has been seen.
            choice = Choice(choice.gamma, self._gain.speedup(len(lengths)), choice.best_gamma)
        if choice.gamma and choice.speedup >= _ADVANTAGE:
            self._choice = choice
            return choice.gamma
        self._choice = Choice(0, choice.speedup, choice.best_gamma)
        self._unprofitable += 1
        return self._choice.best_gamma if self._unprofitable % _PROBE_EVERY == 0 else 0


def make_speculator(
    config: EngineConfig, costs: CostModel, runner: Runner
) -> Speculator | FeatureSpeculator | None:
    """The drafter that the settings name; without a name the model's own draft, else n-grams.

    Raises ConfigError for a draft that does not exist or does not fit the model.
    """
    gamma = config.num_speculative_tokens or _DEFAULT_GAMMA
    always = config.speculation == "always"
    folder = None
    if config.draft is None and config.model:
        folder = own_draft(Path(config.model))
    elif config.draft not in (None, "ngram"):
        folder = Path(os.path.expanduser(config.draft))
        if not folder.is_dir():
            raise ConfigError(
                f"--draft {config.draft}: there is no such folder; give a draft's, ngram or none"
            )
    if folder is None:
        return Speculator(NgramDrafter(), costs, max_gamma=gamma, always=always)
    if config.model and trained_for(folder) != fingerprint(Path(config.model)):
        _log.warning(
            "the draft %s was trained for other weights than %s: drafts will be rejected more often",
            folder,
            config.model,
        )
    draft = load_feature_draft(folder, runner.model)
    draft.prepare()
    cache = runner.cache
    return FeatureSpeculator(
        draft,
        costs,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_gamma=gamma,
        always=always,
        name=f"feature draft {folder.name}",
    )
