"""How long a step of n tokens takes: measured at warm-up, corrected while running. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class CostModel:
    """Step time as a function of the tokens in it: piecewise linear through measured points.

    Attention's own cost is inside the points as it was at warm-up (short contexts); the running correction,
    an exponential mean of measured / predicted, carries what the points do not know (long contexts, a busy
    machine).
    """

    def __init__(self, points: list[tuple[int, float]] | None = None, correction_rate: float = 0.05) -> None:
        self._rate = correction_rate
        self.set_points(points or [(1, 0.02), (2048, 1.0)])

    def set_points(self, points: list[tuple[int, float]]) -> None:
        """points: (tokens, seconds), ascending. A step never costs more than a measured one of more tokens: what
        a busy machine adds to one measurement is taken out by the next."""
        self.tokens = [n for n, _ in points]
        self.seconds = list(accumulate((s for _, s in reversed(points)), min))[::-1]
        self.correction = 1.0

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens` is expected to take (0 for none)."""
        if num_tokens <= 0:
            return 0.0
        i = bisect_left(self.tokens, num_tokens)
        if i == 0:
            return self.seconds[0] * self.correction
        if i == len(self.tokens):
            if i == 1:
                return self.seconds[0] * self.correction * num_tokens / self.tokens[0]
            i -= 1
        n0, n1, s0, s1 = self.tokens[i - 1], self.tokens[i], self.seconds[i - 1], self.seconds[i]
        return (s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0)) * self.correction

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes a measured step into the correction; one outlier moves it by a few percent at most."""
        predicted = self.predict(num_tokens)
        if predicted > 0:
            ratio = min(max(seconds / predicted, 0.5), 2.0)
            self.correction = min(max(self.correction * (1 + self._rate * (ratio - 1)), 0.1), 20.0)

    def most_tokens(self, seconds: float) -> int:
        """Largest step that is expected to end within `seconds` (0 if none)."""
        lo, hi = 0, 1
        while hi < 1 << 20 and self.predict(hi) <= seconds:
            lo, hi = hi, hi * 2
        while hi - lo > 1:
            mid = (lo + hi) // 2
            lo, hi = (mid, hi) if self.predict(mid) <= seconds else (lo, mid)
        return lo
