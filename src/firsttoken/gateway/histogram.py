"""Latency histograms with bins so fine that percentiles come from them.

Bin i holds values in [BASE·2^(i/8), BASE·2^((i+1)/8)) milliseconds: eight bins per doubling, each 9 % wide, so a
percentile read at the geometric middle of its bin is within 4.5 % of the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BASE_MS = 0.1
PER_DOUBLING = 8
LAST_BIN = 200
"""Values from 0.1 · 2^25 ms (56 minutes) up share the last bin."""


def bin_of(milliseconds: float) -> int:
    if milliseconds <= BASE_MS:
        return 0
    return min(LAST_BIN, int(PER_DOUBLING * math.log2(milliseconds / BASE_MS)))


def middle(bin: int) -> float:
    """The geometric middle of a bin, in milliseconds."""
    return float(BASE_MS * 2 ** ((bin + 0.5) / PER_DOUBLING))


def percentile(counts: Mapping[int, int], share: float) -> float | None:
    """The value below which `share` (0 … 1) of the samples lie, in milliseconds; None without samples."""
    total = sum(counts.values())
    if total <= 0:
        return None
    rank = max(1, math.ceil(share * total))
    for bin in sorted(counts):
        rank -= counts[bin]
        if rank <= 0:
            return middle(bin)
    raise AssertionError("unreachable: ranks end within the total")
