"""Overview: how soon the first token comes, now and over time, how much is served, and what fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from nicegui import ui

from firsttoken.gateway.console import charts, figures, parts
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.parts import SPANS, Column

NOW_S = 300.0
"""What counts as now."""
REFRESH_S = 10.0
SHARES = (("p50", charts.TEAL), ("p95", charts.AMBER), ("p99", charts.ROSE))


async def build(view: View) -> None:
    text = view.text
    shown: dict[str, Any] = {"span": "1h", "load_test": False}

    async def choose(span: str) -> None:
        shown["span"] = span
        await refresh()

    async def with_load_test(event: Any) -> None:
        shown["load_test"] = event.value
        await refresh()

    with parts.title(text("overview.title"), note=text("overview.now_note")):
        parts.switch(text("frame.load_test"), changed=view.act(with_load_test))
        parts.choose_span(view, shown["span"], choose)
    with ui.element("div").classes("tiles"):
        tiles = {
            name: parts.tile(text(f"overview.{name}"))
            for name in ("requests", "p50", "p95", "p99", "speed", "errors")
        }
    with parts.section(text("overview.ttft_over_time")):
        ttft = charts.chart({}, text("overview.ttft_over_time"))
    with ui.element("div").classes("columns"):
        with parts.section(text("overview.requests_over_time")):
            requests = charts.chart({}, text("overview.requests_over_time"))
        with parts.section(text("overview.speed_over_time")):
            speed = charts.chart({}, text("overview.speed_over_time"))
    with parts.section(text("overview.by_model")):
        models = parts.html()

    async def refresh() -> None:
        span, until = SPANS[shown["span"]], time.time()
        since, step = until - span[0], span[1]
        asked = {"load_test": int(shown["load_test"])}
        now, whole, rows, by_model = await asyncio.gather(
            view.api.get("usage", since=until - NOW_S, **asked),
            view.api.get("usage", since=since, **asked),
            view.api.get("usage", since=since, by="time", step=step, **asked),
            view.api.get("usage", since=since, by="model", **asked),
        )
        _show_tiles(view, tiles, _one(now), _one(whole), shown["span"])
        points = charts.filled(rows["data"], since, until, step)
        charts.show(ttft, charts.over_time(_ttft(points), "ms", step=step))
        charts.show(requests, charts.over_time(outcomes(view, points), "", "bar", step))
        charts.show(
            speed, charts.over_time(_speed(view, points, step), text("unit.tokens_per_second"), step=step)
        )
        models.content = _models(view, by_model["data"])

    await refresh()
    view.every(REFRESH_S, refresh)


def _one(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    rows = answer["data"]
    return rows[0] if rows else {}


def _show_tiles(
    view: View, tiles: Mapping[str, parts.Tile], now: Mapping[str, Any], whole: Mapping[str, Any], span: str
) -> None:
    """The figures of the last minutes, and in small those of the whole span."""
    over = view.text(f"span.{span}")

    def note(value: str) -> str:
        return view.text("overview.over_span", value=value, span=over)

    tiles["requests"].show(
        figures.count(now.get("requests", 0)), note(figures.count(whole.get("requests", 0)))
    )
    for name, _ in SHARES:
        values = [(part.get("ttft_ms") or {}).get(name) for part in (now, whole)]
        tiles[name].show(figures.milliseconds(values[0]), note(figures.milliseconds(values[1])))
    tokens = [part.get("completion_tokens", 0) for part in (now, whole)]
    tiles["speed"].show(
        figures.rate(tokens[0] / NOW_S), note(view.text("overview.tokens", count=figures.count(tokens[1])))
    )
    failed = [part.get("error", 0) + part.get("aborted", 0) for part in (now, whole)]
    shares = [figures.share(failed[i], part.get("requests", 0)) for i, part in enumerate((now, whole))]
    words = note(shares[1])
    if limited := whole.get("limited", 0):
        words += f" · {view.text('overview.limited', count=figures.count(limited))}"
    tiles["errors"].show(shares[0], words)


Points = list[tuple[float, Any]]


def _ttft(points: Points) -> dict[str, tuple[str, list[charts.Point]]]:
    return {
        name: (colour, [(at, ((row or {}).get("ttft_ms") or {}).get(name)) for at, row in points])
        for name, colour in SHARES
    }


def outcomes(view: View, points: Points) -> dict[str, tuple[str, list[charts.Point]]]:
    colours = {"ok": charts.TEAL, "limited": charts.AMBER, "aborted": charts.GREY, "error": charts.ROSE}
    return {
        view.text(f"status.{name}"): (colour, [(at, row[name] if row else 0) for at, row in points])
        for name, colour in colours.items()
    }


def _speed(view: View, points: Points, step: int) -> dict[str, tuple[str, list[charts.Point]]]:
    values = [(at, row["completion_tokens"] / step if row else 0.0) for at, row in points]
    return {view.text("overview.speed"): (charts.BLUE, values)}


def _models(view: View, rows: list[dict[str, Any]]) -> str:
    text = view.text
    columns = [
        Column(text("table.model")),
        Column(text("table.requests"), number=True),
        Column("TTFT p50", number=True),
        Column("TTFT p95", number=True),
        Column(text("table.output_tokens"), number=True, wide_only=True),
        Column(text("table.cached"), number=True, wide_only=True),
        Column(text("table.failed"), number=True),
    ]
    cells = [
        (
            parts.link(
                view, f"/requests?model={parts.quoted(row['model'])}", row["model"] or figures.NOTHING
            ),
            figures.count(row["requests"]),
            figures.milliseconds((row["ttft_ms"] or {}).get("p50")),
            figures.milliseconds((row["ttft_ms"] or {}).get("p95")),
            figures.count(row["completion_tokens"]),
            figures.share(row["cached_tokens"], row["prompt_tokens"]),
            figures.share(row["error"] + row["aborted"], row["requests"]),
        )
        for row in rows
    ]
    return parts.table(columns, cells, text("overview.nothing_yet"))
