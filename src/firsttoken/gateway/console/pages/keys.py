"""Keys and plans: all of them, with their limits and their TTFT of the last day, and how to make more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import figures, forms, parts
from firsttoken.gateway.console.client import segment
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.parts import Cell, Column

DAY_S = 86_400.0


async def build(view: View) -> None:
    text = view.text
    shown: dict[str, Any] = {"words": "", "revoked": False}

    async def new_key() -> None:
        if await forms.new_key(view):
            await refresh()

    async def new_plan() -> None:
        if await forms.edit_plan(view, None):
            await refresh()

    with parts.title(text("keys.title")):
        ui.button(text("plans.create"), on_click=view.act(new_plan)).props("flat no-caps")
        ui.button(text("keys.create"), icon="add", on_click=view.act(new_key)).props("unelevated no-caps")
    with parts.section(text("keys.keys"), text("keys.last_day")):
        with ui.element("div").classes("filters"):
            words = parts.field(text("keys.search")).props("clearable")
            revoked = parts.switch(text("keys.show_revoked"))
        keys = parts.html()
    with parts.section(text("plans.plans"), text("plans.note")):
        plans = ui.element("div")

    async def refresh() -> None:
        all_keys, all_plans, usage = await asyncio.gather(
            view.api.get("keys", revoked=int(shown["revoked"])),
            view.api.get("plans"),
            view.api.get("usage", since=time.time() - DAY_S, by="key", load_test=1),
        )
        used = {row["key"]: row for row in usage["data"]}
        found = [key for key in all_keys["data"] if shown["words"] in f"{key['name']} {key['hint']}".lower()]
        found.sort(key=lambda key: (key["revoked_at"] is not None, key["name"].lower()))
        keys.content = _keys(view, found, used)
        plans.clear()
        with plans:
            _plans(view, all_plans["data"], all_keys["data"], refresh)

    async def filter_changed() -> None:
        shown.update(words=(words.value or "").strip().lower(), revoked=revoked.value)
        await refresh()

    words.on_value_change(view.act(filter_changed))
    revoked.on_value_change(view.act(filter_changed))
    await refresh()


def _keys(view: View, keys: list[dict[str, Any]], used: dict[str, dict[str, Any]]) -> str:
    text = view.text
    columns = [
        Column(text("table.name")),
        Column(text("table.key"), wide_only=True),
        Column(text("table.plan")),
        Column(text("table.limits")),
        Column(text("table.requests"), number=True),
        Column("TTFT p50", number=True, wide_only=True),
        Column("TTFT p95", number=True),
        Column(text("table.spend"), number=True, wide_only=True),
        Column(text("table.state")),
    ]
    rows = []
    for key in keys:
        row = used.get(key["id"], {})
        ttft = row.get("ttft_ms") or {}
        rows.append(
            (
                parts.link(view, f"/keys/{segment(key['id'])}", key["name"]),
                Markup("<code>{}</code>").format(key["hint"]),
                key["plan"] or figures.NOTHING,
                limits(view, key),
                figures.count(row.get("requests", 0)),
                figures.milliseconds(ttft.get("p50")),
                figures.milliseconds(ttft.get("p95")),
                figures.money(row.get("cost_nano", 0)),
                state(view, key),
            )
        )
    return parts.table(columns, rows, text("keys.none"))


def limits(view: View, key: dict[str, Any]) -> str:
    """The key's own limits, shortly: 60 RPM · 2 at once."""
    found = [
        view.text(f"limits.{name}_short", count=figures.count(key[name]))
        for name in ("rpm", "tpm", "max_concurrency")
        if key[name] is not None
    ]
    return " · ".join(found) or figures.NOTHING


def state(view: View, key: dict[str, Any]) -> Cell:
    """What a key is: revoked, expired, an admin's, for load tests, or simply active."""
    if key["revoked_at"] is not None:
        return parts.badge(view.text("keys.revoked"), "bad")
    if key["expires_at"] is not None and key["expires_at"] <= time.time():
        return parts.badge(view.text("keys.expired"), "bad")
    if key["role"] == "admin":
        return parts.badge(view.text("keys.admin"), "warn")
    if key["load_test"]:
        return parts.badge(view.text("keys.load_test"), "plain")
    return parts.badge(view.text("keys.active"), "good")


def _plans(view: View, plans: list[dict[str, Any]], keys: list[dict[str, Any]], changed: Any) -> None:
    if not plans:
        parts.html(Markup('<p class="empty">{}</p>').format(view.text("plans.none")))
    with ui.element("div").classes("cards"):
        for plan in plans:
            _plan(
                view,
                plan,
                sum(key["plan"] == plan["name"] and not key["revoked_at"] for key in keys),
                changed,
            )


def _plan(view: View, plan: dict[str, Any], users: int, changed: Any) -> None:
    text = view.text

    async def edit() -> None:
        if await forms.edit_plan(view, plan):
            await changed()

    async def delete() -> None:
        if await parts.confirm(view, text("plans.delete_question", name=plan["name"]), text("plans.delete")):
            await view.api.change("DELETE", f"plans/{segment(plan['id'])}")
            await changed()

    quotas = [
        (
            text(f"plans.{quota}"),
            figures.count(plan[quota]) if plan[quota] is not None else text("limits.none"),
        )
        for quota in forms.QUOTAS
    ]
    with ui.element("div").classes("small-card"):
        parts.html(
            Markup("<h3>{} {}</h3>").format(
                plan["name"], parts.badge(text(f"priority.{plan['priority']}"), "plain")
            )
        )
        parts.html(
            parts.facts(
                [
                    *quotas,
                    (
                        text("table.models"),
                        ", ".join(plan["models"]) if plan["models"] is not None else text("keys.all_models"),
                    ),
                    (text("plans.upstream"), plan["upstream"] or text("plans.any_upstream")),
                    (text("plans.users"), figures.count(users)),
                ]
            )
        )
        with ui.element("div").classes("buttons"):
            ui.button(text("frame.edit"), on_click=view.act(edit)).props("flat no-caps dense")
            ui.button(text("plans.delete"), on_click=view.act(delete), color="negative").props(
                "flat no-caps dense"
            )
