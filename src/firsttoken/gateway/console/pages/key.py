"""One key: its limits, what it has used, and how long its first tokens take."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import charts, figures, forms, parts
from firsttoken.gateway.console.client import segment
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.pages.keys import state
from firsttoken.gateway.console.pages.overview import outcomes
from firsttoken.gateway.console.parts import SPANS

REFRESH_S = 10.0


async def build(view: View) -> None:
    text = view.text
    path = f"keys/{segment(view.request.path_params['id'])}"
    key = await view.api.get(path)
    shown = {"span": "24h"}

    async def edit() -> None:
        if await forms.edit_key(view, await view.api.get(path)):
            await refresh()

    async def rotate() -> None:
        if await parts.confirm(view, text("keys.rotate_question", name=key["name"]), text("keys.rotate")):
            made = await view.api.change("POST", f"{path}/rotate")
            await forms.show_secret(view, made.pop("secret"), made["name"])
            await refresh()

    async def revoke() -> None:
        if await parts.confirm(view, text("keys.revoke_question", name=key["name"]), text("keys.revoke")):
            await view.api.change("POST", f"{path}/revoke")
            await refresh()

    async def choose(span: str) -> None:
        shown["span"] = span
        await refresh()

    with parts.title(key["name"], (view.href("/keys"), text("keys.title"))):
        live = ui.element("div").classes("buttons")
        with live:
            ui.button(text("keys.revoke"), on_click=view.act(revoke), color="negative").props("flat no-caps")
            ui.button(text("keys.rotate"), on_click=view.act(rotate)).props("flat no-caps")
            ui.button(text("frame.edit"), icon="tune", on_click=view.act(edit)).props("unelevated no-caps")
    with ui.element("div").classes("columns uneven"):
        with parts.section(text("keys.about")):
            about = parts.html()
        with parts.section(text("keys.use")):
            quotas = parts.html()
            sums = parts.html()
    with ui.element("div").classes("head"):
        parts.html(Markup("<h2>{}</h2>").format(text("keys.over_time")))
        parts.choose_span(view, shown["span"], choose)
    with ui.element("div").classes("columns"):
        with parts.section(text("keys.distribution"), text("keys.distribution_note")):
            distribution = charts.chart({}, text("keys.distribution"))
        with parts.section(text("overview.requests_over_time")):
            requests = charts.chart({}, text("overview.requests_over_time"))
    with ui.element("p"):
        parts.html(parts.link(view, f"/requests?key={parts.quoted(key['id'])}", text("keys.its_requests")))

    async def refresh() -> None:
        span, until = SPANS[shown["span"]], time.time()
        which = {"key": key["id"], "since": until - span[0], "load_test": 1}
        now, whole, bins, rows = await asyncio.gather(
            view.api.get(path),
            view.api.get("usage", **which),
            view.api.get("ttft", **which),
            view.api.get("usage", **which, by="time", step=span[1]),
        )
        live.visible = now["revoked_at"] is None
        about.content = _about(view, now)
        quotas.content = _quotas(view, now)
        usage = whole["data"][0] if whole["data"] else {}
        sums.content = _sums(view, usage, shown["span"])
        ttft = usage.get("ttft_ms") or {}
        marks = {name: ttft[name] for name in ("p50", "p95") if ttft.get(name)}
        pairs = [(one["ms"], one["count"]) for one in bins["data"]]
        charts.show(distribution, charts.bars(pairs, text("table.requests"), marks))
        points = charts.filled(rows["data"], until - span[0], until, span[1])
        charts.show(requests, charts.over_time(outcomes(view, points), "", "bar", span[1]))

    await refresh()
    view.every(REFRESH_S, refresh)


def _about(view: View, key: dict[str, Any]) -> str:
    text = view.text
    none = text("limits.none")
    models = ", ".join(key["models"]) if key["models"] is not None else text("keys.all_models")
    return parts.facts(
        [
            (text("table.state"), state(view, key)),
            (text("table.key"), Markup("<code>{}</code>").format(key["hint"])),
            (text("table.plan"), key["plan"] or text("keys.no_plan")),
            (text("table.models"), models),
            *(
                (text(f"limits.{name}"), figures.count(key[name]) if key[name] is not None else none)
                for name in forms.LIMITS
            ),
            (text("keys.created"), parts.when(key["created_at"])),
            (
                text("keys.expires"),
                figures.day(key["expires_at"]) if key["expires_at"] is not None else text("keys.never"),
            ),
        ]
    )


def _quotas(view: View, key: dict[str, Any]) -> str:
    """How much of each quota of its plan the running window has seen."""
    rows = []
    for kind, limit in key["quotas"].items():
        used = key["quota_use"].get(kind, {}).get("used", 0)
        words = view.text("keys.of_quota", used=figures.count(used), limit=figures.count(limit))
        rows.append((view.text(f"plans.{kind}"), parts.meter(used, limit, words)))
    return parts.facts(rows) if rows else Markup("")


def _sums(view: View, usage: dict[str, Any], span: str) -> str:
    text = view.text
    ttft = usage.get("ttft_ms") or {}
    return parts.facts(
        [
            (text("keys.span"), text(f"span.{span}")),
            (text("table.requests"), figures.count(usage.get("requests", 0))),
            *((f"TTFT {name}", figures.milliseconds(ttft.get(name))) for name in ("p50", "p95", "p99")),
            (text("table.prompt_tokens"), figures.count(usage.get("prompt_tokens", 0))),
            (
                text("table.cached"),
                figures.share(usage.get("cached_tokens", 0), usage.get("prompt_tokens", 0)),
            ),
            (text("table.output_tokens"), figures.count(usage.get("completion_tokens", 0))),
            (text("table.limited"), figures.count(usage.get("limited", 0))),
            (text("table.failed"), figures.count(usage.get("error", 0) + usage.get("aborted", 0))),
            (text("table.spend"), figures.money(usage.get("cost_nano", 0))),
        ]
    )
