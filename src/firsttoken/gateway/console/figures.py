"""Figures as people read them."""

from __future__ import annotations

import time

NOTHING = "–"


def milliseconds(value: float | None) -> str:
    """0.42 ms, 7.3 ms, 84 ms, 1.24 s, 75 s."""
    if value is None:
        return NOTHING
    if value < 1:
        return f"{value:.2f} ms"
    if value < 10:
        return f"{value:.1f} ms"
    if value < 1000:
        return f"{value:.0f} ms"
    return f"{value / 1e3:.2f} s" if value < 10_000 else f"{value / 1e3:.0f} s"


def count(value: float | None) -> str:
    """912, 12,340, 1.2 M."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) < 1e6 else f"{value / 1e6:,.1f} M"


def rate(value: float | None) -> str:
    """0.42, 7.3, 84, 1,200."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def share(part: float, whole: float) -> str:
    """A percentage; nothing of nothing."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def day(at: float | None) -> str:
    return NOTHING if at is None else time.strftime("%Y-%m-%d", time.localtime(at))


def money(nano: float) -> str:
    """Currency units from 1e-9 of them."""
    return NOTHING if not nano else f"{nano / 1e9:,.2f}" if nano >= 1e7 else f"{nano / 1e9:.4f}"
