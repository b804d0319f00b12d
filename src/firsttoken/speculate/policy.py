"""How many tokens to draft: the γ with the most expected tokens per second, 0 included.

With a_i the chance that the i-th draft stands given that those before it did, a draft of γ tokens yields
1 + a_1 + a_1 a_2 + … tokens on average (Leviathan et al., 2023), and costs what a step of that many rows costs
plus the drafting. Both are measured while serving.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from firsttoken.engine.costs import CostModel

_PRIOR_TRIES = 4.0
"""The prior acceptance weighs as much as this many observed drafts."""
_MEMORY = 512.0
"""Observations per position beyond which old ones fade."""


_COST_RATE = 0.1
"""Weight of a new measurement of a drafting step in its running mean."""
_GAIN_RATE = 0.05
"""Weight of a new cycle in the running means, once there are more than twenty."""


class Acceptance:
    """Running acceptance per draft position, conditional on the positions before it."""

    def __init__(self, positions: int, prior: float = 0.5) -> None:
        self._tries = [0.0] * positions
        self._hits = [0.0] * positions
        self._prior = prior
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

    def rates(self) -> list[float]:
        """For each position the chance that its draft stands if all before it did. Little-seen positions are taken to
        be like the one before."""
        rates, before = [], self._prior
        for tries, hits in zip(self._tries, self._hits, strict=True):
            before = (hits + _PRIOR_TRIES * before) / (tries + _PRIOR_TRIES)
            rates.append(before)
        return rates


@dataclass(slots=True, frozen=True)
class Choice:
    """A choice of γ and what it is expected to bring."""

    gamma: int
    """The best γ above 0, whether or not it pays."""
    speedup: float
    """Expected tokens per second over those without drafts."""


def choose_gamma(
    acceptance: Acceptance,
    draft_lengths: Seq[int],
    *,
    count: int,
    plain_seconds: float,
    step_seconds: float,
    row_seconds: Callable[[int], float],
) -> Choice:
    """The γ for one step of `count` sequences, of which some can be drafted for. Ties go to the smaller γ.

    draft_lengths: for each of these, the most tokens that its drafter offers.
    plain_seconds: of the step without drafts; step_seconds: of drafting one more token for all of them;
    row_seconds: what so many more rows add to the step.
    """
    rates = acceptance.rates()
    best = Choice(0, 0.0)
    tokens, chance, seconds, rows = float(count), 1.0, plain_seconds, 0
    for gamma in range(1, max(draft_lengths, default=0) + 1):
        chance *= rates[gamma - 1]
        drafted = sum(n >= gamma for n in draft_lengths)
        tokens += chance * drafted
        rows += drafted
        seconds += step_seconds
        speedup = tokens / (seconds + row_seconds(rows)) * plain_seconds / count
        if speedup > best.speedup * (1 + 1e-9):
            best = Choice(gamma, speedup)
    return best


class StepTimes:
    """What a drafting step takes, by batch size to the next power of two."""

    def __init__(self, share: float, costs: CostModel) -> None:
        """share: of a step of the model, until measured; 0 for a drafter that costs nothing."""
        self._share, self._costs = share, costs
        self._known: dict[int, float] = {}

    def seconds(self, count: int) -> float:
        bucket = (count - 1).bit_length()
        if not self._known:
            return self._share * self._costs.predict(count)
        if bucket in self._known:
            return self._known[bucket]
        return self._known[min(self._known, key=lambda b: abs(b - bucket))]

    def observe(self, count: int, seconds: float) -> None:
        bucket = (count - 1).bit_length()
        old = self._known.get(bucket)
        if old is None:
            self._known[bucket] = min(seconds, self.seconds(count) * 2)  # the first one is cold
        else:
            self._known[bucket] = old + _COST_RATE * (min(seconds, 2 * old) - old)


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


class Retries:
    """When drafting that did not pay is tried again, by batch size to the next power of two: soon at first, because
    the verdict may come from an unusual text or from a busy moment, then ever more rarely."""

    FIRST, LAST = 16, 256
    """Plain steps before the first try again, and before each at the end: the gap doubles."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[int, int]] = {}
        """Plain steps still to come, and the gap that they are part of."""

    def due(self, count: int) -> bool:
        """Whether this step tries again; called once a step that does not draft."""
        key = (count - 1).bit_length()
        left, gap = self._waits.get(key, (self.FIRST, self.FIRST))
        if left > 1:
            self._waits[key] = (left - 1, gap)
            return False
        gap = min(2 * gap, self.LAST)
        self._waits[key] = (gap, gap)
        return True

    def soon(self, count: int) -> bool:
        """Whether the next step tries again."""
        return self._waits.get((count - 1).bit_length(), (self.FIRST, 0))[0] <= 1

    def paid(self, count: int) -> None:
        """Drafting pays: should that end, the first try again comes soon."""
        self._waits.pop((count - 1).bit_length(), None)


class MeasuredGain:
    """What drafting brings, measured: tokens per second of cycles of drafting and verification over those of plain
    steps, by batch size to the next power of two.

    Both sides are measured while serving. A cost model by the number of tokens alone would not do: 24 rows of four
    long sequences cost more than 24 rows of one short prompt, and drafting would be judged by the difference.
    """

    def __init__(self, costs: CostModel, step_share: float = 0.0) -> None:
        """costs: what a plain step is taken to cost until one has been seen. step_share: what a drafting step should
        take of one."""
        self._costs = costs
        self._least_cycle = 1 + step_share / 2
        """Of plain steps: no cycle is taken to be shorter."""
        self._cycles: dict[int, tuple[int, float, float]] = {}
        """Cycles seen; running means of tokens and of seconds in one sequence's part of a cycle."""
        self._plain: dict[int, tuple[int, float]] = {}
        """Plain steps seen; running mean of the seconds of one sequence's part."""
        self._fresh: dict[int, int] = {}
        """Cycles since the last `forget`."""

    def observe(self, count: int, tokens: int, seconds: float) -> None:
        """A cycle of `count` sequences brought `tokens`."""
        key = (count - 1).bit_length()
        seen, mean_tokens, mean_seconds = self._cycles.get(key, (0, 0.0, 0.0))
        seen += 1
        rate = max(1 / seen, _GAIN_RATE)
        self._fresh[key] = self._fresh.get(key, 0) + 1
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

    def forget(self, count: int, cycles: int) -> None:
        """Lets what was seen weigh as much as so many cycles, so that the next ones can change the verdict."""
        key = (count - 1).bit_length()
        if key in self._cycles:
            seen, tokens, seconds = self._cycles[key]
            self._cycles[key] = (min(seen, cycles), tokens, seconds)
            self._fresh[key] = 0

    def cycles(self, count: int) -> int:
        return self._cycles.get((count - 1).bit_length(), (0, 0.0, 0.0))[0]

    def fresh_cycles(self, count: int) -> int:
        """Cycles since the start, or since the last `forget`."""
        return self._fresh.get((count - 1).bit_length(), 0)

    def plain_steps(self, count: int) -> int:
        return self._plain.get((count - 1).bit_length(), (0, 0.0))[0]

    def plain_seconds(self, count: int) -> float:
        """A step of `count` sequences without drafts: as measured, else as predicted."""
        seen, mean = self._plain.get((count - 1).bit_length(), (0, 0.0))
        return mean * count if seen else self._costs.predict(count)

    def tokens_per_cycle(self, count: int) -> float:
        return self._cycles.get((count - 1).bit_length(), (0, 1.0, 0.0))[1]

    def speedup(self, count: int) -> float:
        """Over plain steps of `count` sequences; 1 while nothing has been seen.

        Bounded by what the cycle's tokens can bring at all: a machine that was busy during the plain steps alone must
        not make a draft look good.
        """
        seen, tokens, seconds = self._cycles.get((count - 1).bit_length(), (0, 1.0, 0.0))
        if not seen or seconds <= 0:
            return 1.0
        return min(tokens / self._least_cycle, tokens / seconds * self.plain_seconds(count) / count)

    def pays_above(self, count: int) -> float:
        """Tokens per cycle at which drafting would break even, at the measured times."""
        return self.tokens_per_cycle(count) / max(self.speedup(count), 1e-9)
