"""Whether to draft, how far, and the words for why: one policy for every kind of drafter.

Everything that decides is measured while serving: what a plain step takes, what a cycle of drafting and verification
takes and brings, what a drafting step takes, and how often drafts stand, by position and by the drafter's own
probability.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from firsttoken.engine.costs import CostModel
from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed
from firsttoken.speculate.drafter import Drafter
from firsttoken.speculate.policy import (
    Acceptance,
    Calibration,
    Choice,
    MeasuredGain,
    Retries,
    StepTimes,
    choose_gamma,
)

_log = logging.getLogger(__name__)

MOST = 8
"""Tokens that are drafted at most in a step where the settings leave it to the policy."""
ALWAYS = 5
"""γ where drafts are always made and the settings name none."""
_PLAIN_EVERY, _PLAIN_STEPS = 100, 2
"""Plain steps before the first draft, and of every so many while drafting: what drafting is measured against."""
_TRIES = 8
"""Cycles before drafting is judged."""
_HOPELESS, _HOPELESS_TRIES = 0.9, 3
"""After so many cycles that measured a speed-up below this, the others are spared."""
_RETRY_CYCLES = 4
"""Cycles of a try again; what was seen before weighs as much as the rest of `_TRIES`."""
_ADVANTAGE = 1.03
"""`auto` drafts only above this speed-up: below, the measurement's own error decides."""


class CycleJudge:
    """Implements `drafter.Judge`: a draft goes on while its chance to stand whole is worth one more token's time."""

    def __init__(self, calibrations: list[Calibration], floor: float) -> None:
        """calibrations: what each sequence's probabilities are worth; floor: the least chance that pays, 0: none."""
        self.wants_probabilities = floor > 0
        self.probabilities: list[list[float]] = [[] for _ in calibrations]
        self.step_seconds = 0.0
        self.was_asked = False
        self._calibrations, self._floor = calibrations, floor
        self._chances = [1.0] * len(calibrations)

    def keeps(self, index: int, probability: float) -> bool:
        self.was_asked = True
        if self.wants_probabilities:
            self._chances[index] *= self._calibrations[index].rate(probability)
            if self._chances[index] < self._floor:
                return False
            self.probabilities[index].append(probability)
        return True

    def took(self, steps: int, seconds: float) -> None:
        self.step_seconds = seconds / steps


class Speculator:
    """Implements `engine.speculation.Speculator` over a drafter."""

    def __init__(self, drafter: Drafter, costs: CostModel, *, gamma: int | None, always: bool) -> None:
        """gamma: most tokens to draft in a step, None: the policy's choice. always: `gamma` of them in every step,
        whether or not it pays."""
        self.drafter = drafter
        self.capture = drafter.capture
        self.max_gamma = gamma or (ALWAYS if always else MOST)
        self._always = always
        self._costs = costs
        self._acceptance = Acceptance(self.max_gamma)
        self._calibrations = (Calibration(), Calibration())
        """Of greedy and of sampled sequences."""
        self._gain = MeasuredGain(costs, drafter.step_share)
        self._times = StepTimes(drafter.step_share, costs)
        self._probabilities: dict[Sequence, list[float]] = {}
        """The drafter's own, of what it drafted for the step that runs now."""
        self._count = 1
        """Sequences in the step that runs now; whether it drafts, since when, and how many of its drafts stood:"""
        self._drafting = False
        self._cycle_seconds = 0.0
        self._stood = 0
        self._choice = Choice(0, 0.0)
        self._judged = False
        """Whether the drafter asks token by token: then each draft ends where its own chance does, and a limit from the
        mean over all drafts would cut the sure ones short."""
        self._retries = Retries()
        self._profitable = 0
        self._drafted = self._accepted = 0
        self._verdict: str | None = None
        self._warned = False

    @property
    def lookahead(self) -> int:
        return self.max_gamma if self.drafter.lookahead and self._may_draft(self._count) else 0

    # -- for the engine -------------------------------------------------------------------------------------

    def computed(self, items: list[Computed], *, prompts_wait: bool) -> None:
        self.drafter.computed(items, work=not prompts_wait and self._may_draft(self._count))

    def forget(self, seq: Sequence) -> None:
        self.drafter.forget(seq)

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in seqs]
        self._probabilities = {}
        self._count, self._drafting, self._stood = len(seqs), False, 0
        offers = self.drafter.offers(seqs, [self._room(seq) for seq in seqs])
        chosen = [i for i, n in enumerate(offers) if n > 0]
        if not chosen or budget < 1:
            return drafts
        gamma = self._gamma([offers[i] for i in chosen])
        counts: list[int] = []
        for i in chosen:
            counts.append(min(gamma, offers[i], budget))
            budget -= counts[-1]
        chosen, counts = [i for i, n in zip(chosen, counts, strict=True) if n], [n for n in counts if n]
        if chosen:
            found = self._draft([seqs[i] for i in chosen], counts)
            for i, draft in zip(chosen, found, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, seq: Sequence, drafts: list[int], num_accepted: int) -> None:
        self._acceptance.observe(len(drafts), num_accepted)
        calibration = self._calibration(seq)
        for i, p in enumerate(self._probabilities.get(seq, ())[: num_accepted + 1]):
            calibration.observe(p, i < num_accepted)
        self._stood += num_accepted
        self._drafted += len(drafts)
        self._accepted += num_accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if self._drafting:
            self._gain.observe(self._count, self._count + self._stood, seconds + self._cycle_seconds)
            self._tell()
        elif num_tokens:
            self._gain.observe_plain(num_tokens, seconds)

    # -- a cycle --------------------------------------------------------------------------------------------

    def _room(self, seq: Sequence) -> int:
        """Most tokens worth drafting: none past the end of the answer."""
        if not seq.request.speculate:
            return 0
        return max(0, min(self.max_gamma, seq.request.sampling.max_tokens - seq.num_output_tokens - 1))

    def _draft(self, seqs: list[Sequence], counts: list[int]) -> list[list[int]]:
        self.drafter.catch_up(seqs)
        started = time.perf_counter()
        floor = 0.0 if self._always else self._floor(len(seqs))
        judge = CycleJudge([self._calibration(seq) for seq in seqs], floor)
        drafts = self.drafter.draft(seqs, counts, judge)
        self._cycle_seconds = time.perf_counter() - started
        self._drafting = True
        self._judged = judge.was_asked
        self._probabilities = dict(zip(seqs, judge.probabilities, strict=True))
        if judge.step_seconds:
            self._times.observe(len(seqs), judge.step_seconds)
        return drafts

    def _calibration(self, seq: Sequence) -> Calibration:
        return self._calibrations[seq.request.sampling.temperature > 0]

    def _gamma(self, offers: list[int]) -> int:
        """How many tokens this step drafts at most, 0 included; offers: of the sequences that have one."""
        if self._always:
            return self.max_gamma
        count = self._count
        rows = self._costs.predict(count)
        self._choice = choose_gamma(
            self._acceptance,
            offers,
            count=count,
            plain_seconds=self._gain.plain_seconds(count),
            step_seconds=self._times.seconds(len(offers)),
            row_seconds=lambda more: self._costs.predict(count + more) - rows,
        )
        if not self._pays(count):
            return 0
        return self.max_gamma if self._judged else self._choice.gamma

    def _pays(self, count: int) -> bool:
        """Whether this step drafts, for `count` sequences; called once a step that could."""
        if self._gain.plain_steps(count) < _PLAIN_STEPS:
            return False
        if self._is_trying(count):
            return True
        if self._gain.speedup(count) >= _ADVANTAGE:
            self._retries.paid(count)
            self._profitable += 1
            return self._profitable % _PLAIN_EVERY >= _PLAIN_STEPS
        if not self._retries.due(count):
            return False
        self._gain.forget(count, _TRIES - _RETRY_CYCLES)
        return True

    def _is_trying(self, count: int) -> bool:
        """Whether cycles of this batch size are still too few to judge by."""
        gain = self._gain
        hopeless = gain.fresh_cycles(count) >= _HOPELESS_TRIES and gain.speedup(count) < _HOPELESS
        return gain.cycles(count) < _TRIES and not hopeless

    def _may_draft(self, count: int) -> bool:
        """Whether one of the next steps may draft, so that it is worth while to be ready."""
        if self._always or self._is_trying(count) or self._gain.speedup(count) >= _ADVANTAGE:
            return True
        return self._retries.soon(count)

    def _floor(self, count: int) -> float:
        """The least chance to stand at which one more drafted token pays: its share of a drafting step and its row in
        the verification, counted in tokens that the time would bring otherwise."""
        if not self.drafter.step_share:
            return 0.0
        plain = self._gain.plain_seconds(count)
        rate = count / plain * max(1.0, self._gain.speedup(count))
        rows = count * 3
        more = self._costs.predict(rows + count) - self._costs.predict(rows)
        return min(0.9, rate * (self._times.seconds(count) + more) / count)

    # -- why ------------------------------------------------------------------------------------------------

    def _judgement(self) -> tuple[str, str]:
        """(always | measuring | pays | too slow, the same in a sentence)"""
        count, gain = self._count, self._gain
        tried = gain.cycles(count)
        if self._always:
            return "always", f"always on, γ {self.max_gamma}"
        if self._is_trying(count):
            return "measuring", f"still measuring: {tried} of {_TRIES} cycles with {count} running"
        speedup = gain.speedup(count)
        verdict = "pays" if speedup >= _ADVANTAGE else "too slow"
        words = "drafting pays" if verdict == "pays" else "not drafting"
        rate = f"{self._accepted / self._drafted:.0%} of the drafts stand, " if self._drafted else ""
        return verdict, (
            f"{words}: {rate}{gain.tokens_per_cycle(count):.2f} tokens per cycle with {count} running,"
            f" {gain.pays_above(count):.2f} would break even; measured speed-up {speedup:.2f}"
        )

    def _tell(self) -> None:
        """Logs a verdict when it changes: the first time that a draft is turned off is a warning."""
        verdict, reason = self._judgement()
        if verdict != self._verdict:
            self._verdict = verdict
            off = verdict == "too slow" and self.drafter.step_share > 0 and not self._warned
            self._warned |= off
            _log.log(logging.WARNING if off else logging.INFO, "%s: %s", self.drafter.name, reason)

    def describe(self) -> dict[str, Any]:
        count = self._count
        verdict, reason = self._judgement()
        tried = self._gain.cycles(count)
        drafting = verdict != "too slow"
        plain = self._gain.plain_seconds(count)
        return {
            "active": drafting and (tried > 0 or self._always),
            "drafter": self.drafter.name,
            "verdict": verdict,
            "gamma": 0
            if not drafting
            else self.max_gamma
            if self._always or self._judged
            else self._choice.gamma,
            "acceptance_rate": self._accepted / self._drafted if self._drafted else None,
            "acceptance_per_position": [round(rate, 4) for rate in self._acceptance.rates()],
            "tokens_per_cycle": self._gain.tokens_per_cycle(count) if tried else None,
            "pays_above": self._gain.pays_above(count) if tried else None,
            "draft_cost": self._times.seconds(count) / plain,
            "predicted_speedup": self._choice.speedup or None,
            "speedup": self._gain.speedup(count) if tried else None,
            "reason": reason,
        }
