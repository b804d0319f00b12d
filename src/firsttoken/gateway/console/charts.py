"""Charts, as ECharts options. The colours read well on white and on black, so a theme needs no second set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from firsttoken.gateway.console import figures
from firsttoken.gateway.histogram import PER_DOUBLING

INK = "#7d848e"
GRID = "rgba(128,128,128,.16)"
TEAL, AMBER, ROSE, BLUE, VIOLET, GREY = "#1a9c8c", "#d9962b", "#d65f6a", "#4a86d8", "#8f7ad6", "#9aa1ab"

Point = tuple[float, float | None]
"""Seconds since the epoch, and a value."""


def chart(options: dict[str, Any], label: str) -> ui.echart:
    made = ui.echart(options, renderer="svg").classes("chart")
    return made.props(f'role=img aria-label="{label}"')


def over_time(
    series: Mapping[str, tuple[str, Sequence[Point]]], unit: str, kind: str = "line", step: int = 60
) -> dict[str, Any]:
    """Lines, or bars on top of each other. `series`: name → colour and points, gaps where a value is missing."""
    lines: list[dict[str, Any]] = []
    for name, (colour, points) in series.items():
        data = [[round(at * 1e3), None if value is None else round(value, 3)] for at, value in points]
        line: dict[str, Any] = {"name": name, "type": kind, "data": data, "color": colour}
        if kind == "line":
            # A lone point between gaps would be invisible as a line.
            alone = sum(value is not None for _, value in points) < 3
            line |= {"showSymbol": alone, "symbolSize": 5, "lineStyle": {"width": 1.8}, "smooth": 0.15}
        else:
            line |= {"stack": "all", "barMaxWidth": 14}
        lines.append(line)
    first = [points[0][0] for _, points in series.values() if points]
    last = [points[-1][0] for _, points in series.values() if points]
    return {
        **_common(),
        "grid": {"left": 8, "right": 12, "top": 34, "bottom": 4, "containLabel": True},
        "legend": _legend(len(series)),
        "tooltip": {"trigger": "axis", **_tooltip(), ":valueFormatter": _formatter(unit)},
        "xAxis": {
            "type": "time",
            "min": round(min(first) * 1e3) if first else None,
            "max": round((max(last) + (step if kind == "bar" else 0)) * 1e3) if last else None,
            "axisLine": {"lineStyle": {"color": GRID}},
            "axisTick": {"show": False},
            "axisLabel": {"color": INK, "hideOverlap": True, "fontSize": 11, "formatter": _moment(step)},
            "splitLine": {"show": False},
        },
        "yAxis": _values(unit),
        "series": lines,
    }


def bars(bins: Sequence[tuple[float, int]], name: str, marks: Mapping[str, float]) -> dict[str, Any]:
    """How many requests took how long; bins of the gateway's histogram, empty ones between them included.

    `bins`: middle in milliseconds and count, in ascending order. `marks`: name → milliseconds, as p95.
    """
    everything = _without_gaps(bins)
    middles = [middle for middle, _ in everything]

    def nearest(value: float) -> int:
        return min(range(len(middles)), key=lambda i: abs(middles[i] - value))

    lines = [
        {"xAxis": nearest(value), "label": {"formatter": words}} for words, value in marks.items() if middles
    ]
    return {
        **_common(),
        "grid": {"left": 8, "right": 16, "top": 28, "bottom": 4, "containLabel": True},
        "tooltip": {"trigger": "axis", **_tooltip()},
        "xAxis": {
            "type": "category",
            "data": [figures.milliseconds(middle) for middle in middles],
            "axisLine": {"lineStyle": {"color": GRID}},
            "axisTick": {"show": False},
            "axisLabel": {"color": INK, "fontSize": 11, "hideOverlap": True},
        },
        "yAxis": _values("") | {"minInterval": 1},
        "series": [
            {
                "name": name,
                "type": "bar",
                "data": [count for _, count in everything],
                "color": TEAL,
                "barCategoryGap": "18%",
                "barMaxWidth": 26,
                "markLine": {
                    "symbol": "none",
                    "silent": True,
                    "data": lines,
                    "lineStyle": {"color": AMBER, "type": "dashed"},
                    "label": {"color": INK, "fontSize": 11},
                },
            }
        ],
    }


def _without_gaps(bins: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The bins from the first to the last, each 2^(1/8) times the one before (see `gateway/histogram.py`)."""
    if not bins:
        return []
    counts = {round(PER_DOUBLING * math.log2(middle / bins[0][0])): count for middle, count in bins}
    return [(bins[0][0] * 2 ** (i / PER_DOUBLING), counts.get(i, 0)) for i in range(max(counts) + 1)]


def filled(
    rows: Sequence[Mapping[str, Any]], since: float, until: float, step: int
) -> list[tuple[float, Any]]:
    """Rows by `time` → (start, row or None) for every step of the span, so that silence shows as silence."""
    by_time = {int(row["time"]): row for row in rows}
    start = int(since // step * step)
    return [(float(at), by_time.get(at)) for at in range(start, int(until) + 1, step)]


def show(made: ui.echart, options: dict[str, Any]) -> None:
    """New data for a chart that is on the page."""
    made.options.clear()
    made.options.update(options)
    made.update()


def _common() -> dict[str, Any]:
    return {"animation": False, "textStyle": {"fontFamily": "system-ui, sans-serif"}}


def _moment(step: int) -> str:
    """How a time axis names its points; it does so in the time zone of whoever looks."""
    return "{MM}-{dd}" if step >= 86_400 else "{HH}:{mm}"


def _values(unit: str) -> dict[str, Any]:
    return {
        "type": "value",
        "min": 0,
        "splitNumber": 4,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "axisLabel": {"color": INK, "fontSize": 11, ":formatter": _formatter(unit)},
        "splitLine": {"lineStyle": {"color": GRID}},
    }


def _formatter(unit: str) -> str:
    """JavaScript that writes a value as `figures.py` does."""
    if unit == "ms":
        return "v => v == null ? '–' : v >= 1000 ? +(v / 1000).toPrecision(3) + ' s' : +(+v).toPrecision(3) + ' ms'"
    suffix = f" {unit}" if unit else ""
    return f"v => v == null ? '–' : (+(+v).toFixed(2)).toLocaleString('en') + '{suffix}'"


def _legend(count: int) -> dict[str, Any]:
    return {
        "show": count > 1,
        "top": 0,
        "right": 0,
        "icon": "roundRect",
        "itemWidth": 10,
        "itemHeight": 4,
        "textStyle": {"color": INK, "fontSize": 12},
    }


def _tooltip() -> dict[str, Any]:
    return {
        "confine": True,
        "backgroundColor": "#23262c",
        "borderWidth": 0,
        "textStyle": {"color": "#f3f4f6", "fontSize": 12},
        "axisPointer": {"lineStyle": {"color": INK}, "type": "line"},
    }
