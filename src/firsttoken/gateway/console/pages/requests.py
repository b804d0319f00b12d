"""Requests: filtered, newest or slowest first, each with a bar of where its time went."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import figures, parts
from firsttoken.gateway.console.client import segment
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.parts import SPANS, Column

PAGE_ROWS = 50
STATUSES = ("ok", "error", "aborted", "limited", "running")
PARTS = ("gateway", "queue", "prefill", "other", "first_decode")
"""Of a request's time until its second token, in the order in which they pass."""


async def build(view: View) -> None:
    text = view.text
    keys, live = await asyncio.gather(view.api.get("keys", revoked=1), view.api.get("models"))
    names = {key["id"]: key["name"] for key in keys["data"]}
    every = {"": text("requests.all")}
    # The filters are the page's address: it can be kept, sent, and gone back to.
    asked = {name: view.parameter(name) for name in ("key", "model", "upstream", "status")}
    asked["span"] = view.parameter("span") if view.parameter("span") in SPANS else "24h"
    asked["order"] = view.parameter("order") if view.parameter("order") == "newest" else "slowest"
    asked["load_test"] = "1" if view.parameter("load_test") == "1" else ""
    page = max(1, int(view.parameter("page"))) if view.parameter("page").isdecimal() else 1

    def address(**changed: str) -> str:
        kept = {name: value for name, value in (asked | changed).items() if value}
        return view.href(f"/requests?{urlencode(kept)}")

    def go(name: str) -> Any:
        return view.act(lambda event: ui.navigate.to(address(**{name: str(event.value or "")})))

    with parts.title(text("requests.title")):
        orders = {order: text(f"requests.{order}") for order in ("slowest", "newest")}
        ui.toggle(orders, value=asked["order"], on_change=go("order")).props(
            "unelevated no-caps dense"
        ).classes("spans")
    with ui.element("div").classes("filters"):
        spans = {name: text(f"span.{name}") for name in SPANS}
        parts.select(text("requests.span"), spans, asked["span"], go("span"))
        statuses = every | {name: text(f"status.{name}") for name in STATUSES}
        _filter(text("table.status"), statuses, asked["status"], go("status"))
        _filter(text("table.key"), every | names, asked["key"], go("key"))
        models = [model["name"] for model in live["models"]]
        _filter(text("table.model"), every | {name: name for name in models}, asked["model"], go("model"))
        ups = [up["name"] for up in live["upstreams"]]
        _filter(
            text("table.upstream"), every | {name: name for name in ups}, asked["upstream"], go("upstream")
        )

        def load_test(event: Any) -> None:
            ui.navigate.to(address(load_test="1" if event.value else ""))

        parts.switch(text("frame.load_test"), bool(asked["load_test"]), view.act(load_test))

    query = {name: asked[name] for name in ("key", "model", "upstream", "status", "order", "load_test")}
    answer = await view.api.get(
        "requests",
        **query,
        since=parts.since(asked["span"]),
        limit=PAGE_ROWS + 1,
        offset=(page - 1) * PAGE_ROWS,
    )
    rows = answer["data"][:PAGE_ROWS]
    with ui.element("section").classes("card"):
        parts.html(_legend(view))
        parts.html(_table(view, rows))
        with ui.element("div").classes("pages"):
            if page > 1:
                parts.html(_step(address(page=str(page - 1)), f"‹ {text('requests.previous')}"))
            if len(answer["data"]) > PAGE_ROWS:
                parts.html(_step(address(page=str(page + 1)), f"{text('requests.next')} ›"))


def _filter(label: str, options: dict[str, str], value: str, changed: Any) -> None:
    if value not in options:
        options = options | {value: value}
    parts.select(label, options, value, changed)


def _step(address: str, words: str) -> Markup:
    return Markup('<a href="{}">{}</a>').format(address, words)


def _table(view: View, rows: list[dict[str, Any]]) -> str:
    text = view.text
    columns = [
        Column(text("table.time")),
        Column(text("table.key")),
        Column(text("table.model"), wide_only=True),
        Column(text("table.status")),
        Column("TTFT", number=True),
        Column(text("requests.where"), whole_row=True),
        Column(text("table.duration"), number=True),
        Column(text("table.tokens"), number=True, wide_only=True),
    ]
    longest = max((sum(shares(row).values()) for row in rows), default=0.0)
    cells = [
        (
            parts.link(view, f"/requests/{segment(row['id'])}", parts.when(row["started_at"])),
            row["key_name"],
            row["model"] or row["alias"] or figures.NOTHING,
            parts.status(view, row["status"]),
            figures.milliseconds(row["ttft_ms"]),
            bar(view, row, longest),
            figures.milliseconds(row["duration_ms"]),
            f"{figures.count(row['prompt_tokens'])} → {figures.count(row['completion_tokens'])}",
        )
        for row in rows
    ]
    return parts.table(columns, cells, text("requests.none"))


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Part → milliseconds, of the parts that are known."""
    return {name: row["parts"][name] for name in PARTS if row["parts"][name]}


def bar(view: View, row: dict[str, Any], longest: float) -> Markup:
    """The parts beside each other, as long as they took; `longest` ms fill the width."""
    known = shares(row)
    words = " · ".join(
        f"{view.text(f'part.{name}')} {figures.milliseconds(value)}" for name, value in known.items()
    )
    pieces = Markup("").join(
        Markup('<i class="part-{}" style="width:{:.2f}%"></i>').format(name, 100 * value / longest)
        for name, value in known.items()
    )
    return Markup('<div class="bar" role="img" aria-label="{}" title="{}">{}</div>').format(
        words, words, pieces
    )


def _legend(view: View) -> Markup:
    return Markup('<div class="legend">{}</div>').format(
        Markup("").join(
            Markup('<span title="{}"><i class="part-{}"></i>{}</span>').format(
                view.text(f"part.{name}_note"), name, view.text(f"part.{name}")
            )
            for name in PARTS
        )
    )
