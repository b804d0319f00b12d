"""How many tokens to draft: the γ with the most expected tokens per second, 0 included.

With a_i the chance that the i-th draft stands given that those before it did, a draft of γ tokens yields
1 + a_1 + a_1 a_2 + … tokens on average (Leviathan et al., 2023), and costs what a step of that many rows costs
plus the drafting. Both are measured while serving.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from firsttoken.engine.costs import CostModel

_PRIOR_TRIES = 4.0
"""The prior acceptance weighs as much as this many observed drafts."""
_MEMORY = 512.0
"""Observations per position beyond which old ones fade."""


_GAIN_RATE = 0.05
"""Weight of a new cycle in the running means, once there are more than twenty."""


class Acceptance:
    """Running acceptance per draft position, conditional on the positions before it."""

    def __init__(self, positions: int, prior: float = 0.5) -> None:
        self._tries = [_PRIOR_TRIES] * positions
        self._hits = [_PRIOR_TRIES * prior] * positions
        self.num_observed = 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """One verified draft: positions after the first rejection say nothing."""
        self.num_observed += 1
        for i in range(min(num_drafted, num_accepted + 1, len(self._tries))):
            self._tries[i] += 1
            self._hits[i] += i < num_accepted
            if self._tries[i] > _MEMORY:
                self._tries[i] /= 2
                self._hits[i] /= 2

    def rate(self, position: int) -> float:
        """Chance that draft `position` (0 first) stands if all before it did."""
        return self._hits[position] / self._tries[position]

    def expected_tokens(self, gamma: int) -> float:
        """Tokens per verification of a draft of `gamma` tokens, the bonus token included."""
        total = chance = 1.0
        for i in range(gamma):
            chance *= self.rate(i)
            total += chance
        return total


@dataclass(slots=True, frozen=True)
class Choice:
    """A choice of γ and what it is expected to bring."""

    gamma: int
    speedup: float
    """Expected tokens per second over those without drafts, at the best γ above 0 (even if 0 was chosen)."""
    best_gamma: int
    """That γ."""


def choose_gamma(
    acceptance: Acceptance,
    costs: CostModel,
    draft_lengths: Seq[int],
) -> Choice:
    """The γ for one step over sequences that could be drafted for, where drafting itself costs nothing.

    draft_lengths: for each decoding sequence, the most tokens its drafter offers (0: none).
    Ties go to the smaller γ.
    """
    count = len(draft_lengths)
    base = costs.predict(count)
    plain = count / base
    best = Choice(0, 0.0, 0)
    for gamma in range(1, max(draft_lengths, default=0) + 1):
        rows = count + sum(min(gamma, n) for n in draft_lengths)
        seconds = costs.predict(rows)
        tokens = sum(acceptance.expected_tokens(min(gamma, n)) for n in draft_lengths)
        speedup = tokens / seconds / plain
        if speedup > best.speedup * (1 + 1e-9):
            best = Choice(gamma, speedup, gamma)
    return best if best.speedup > 1.0 else Choice(0, best.speedup, best.best_gamma)


class Calibration:
    """How often a draft stands that its drafter gave a probability of p: in bins of p, learned while serving."""

    def __init__(self, bins: int = 10) -> None:
        self._tries = [_PRIOR_TRIES] * bins
        # Drafts stand more often than their probability says: several tokens below the likeliest share the rest.
        self._hits = [_PRIOR_TRIES * ((i + 0.5) / bins) ** 0.7 for i in range(bins)]

    def rate(self, p: float) -> float:
        i = self._bin(p)
        return float(self._hits[i] / self._tries[i])

    def observe(self, p: float, stood: bool) -> None:
        i = self._bin(p)
        self._tries[i] += 1
        self._hits[i] += stood
        if self._tries[i] > _MEMORY:
            self._tries[i] /= 2
            self._hits[i] /= 2

    def _bin(self, p: float) -> int:
        return min(int(p * len(self._tries)), len(self._tries) - 1)


class MeasuredGain:
    """What drafting brings, measured: tokens per second of cycles of drafting and verification over those of plain
    steps, by batch size to the next power of two.

    Both sides are measured while serving. A cost model by the number of tokens alone would not do: 24 rows of four
    long sequences cost more than 24 rows of one short prompt, and drafting would be judged by the difference.
    """

    def __init__(self, costs: CostModel) -> None:
        """costs: what a plain step is taken to cost until one has been seen."""
        self._costs = costs
        self._cycles: dict[int, tuple[int, float, float]] = {}
        """Cycles seen; running means of tokens and of seconds in one sequence's part of a cycle."""
        self._plain: dict[int, tuple[int, float]] = {}
        """Plain steps seen; running mean of the seconds of one sequence's part."""

    def observe(self, count: int, tokens: int, seconds: float) -> None:
        """A cycle of `count` sequences brought `tokens`."""
        key = (count - 1).bit_length()
        seen, mean_tokens, mean_seconds = self._cycles.get(key, (0, 0.0, 0.0))
        seen += 1
        rate = max(1 / seen, _GAIN_RATE)
        self._cycles[key] = (
            seen,
            mean_tokens + rate * (tokens / count - mean_tokens),
            mean_seconds + rate * (seconds / count - mean_seconds),
        )

    def observe_plain(self, count: int, seconds: float) -> None:
        """A step of `count` sequences without drafts."""
        key = (count - 1).bit_length()
        seen, mean = self._plain.get(key, (0, 0.0))
        seen += 1
        self._plain[key] = (seen, mean + max(1 / seen, _GAIN_RATE) * (seconds / count - mean))

    def cycles(self, count: int) -> int:
        return self._cycles.get((count - 1).bit_length(), (0, 0.0, 0.0))[0]

    def plain_steps(self, count: int) -> int:
        return self._plain.get((count - 1).bit_length(), (0, 0.0))[0]

    def plain_seconds(self, count: int) -> float:
        """A step of `count` sequences without drafts: as measured, else as predicted."""
        seen, mean = self._plain.get((count - 1).bit_length(), (0, 0.0))
        return mean * count if seen else self._costs.predict(count)

    def tokens_per_cycle(self, count: int) -> float:
        return self._cycles.get((count - 1).bit_length(), (0, 1.0, 0.0))[1]

    def speedup(self, count: int) -> float:
        """Over plain steps of `count` sequences; 1 while nothing has been seen."""
        seen, tokens, seconds = self._cycles.get((count - 1).bit_length(), (0, 1.0, 0.0))
        return tokens / seconds * self.plain_seconds(count) / count if seen and seconds > 0 else 1.0

    def pays_above(self, count: int) -> float:
        """Tokens per cycle at which drafting would break even, at the measured times."""
        return self.tokens_per_cycle(count) / max(self.speedup(count), 1e-9)
