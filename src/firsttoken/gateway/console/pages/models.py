"""Models and upstreams: who is up, how loaded, how well caches and drafts do there, and where a name leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import figures, parts
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.parts import Column

REFRESH_S = 5.0
SPAN_S = 3600.0


async def build(view: View) -> None:
    text = view.text
    known: dict[str, Any] = {}

    async def new_alias() -> None:
        if await _ask_for_alias(view, known["models"]):
            await refresh()

    with parts.title(text("models.title")):
        ui.button(text("models.new_alias"), icon="add", on_click=view.act(new_alias)).props(
            "unelevated no-caps"
        )
    with parts.section(text("models.upstreams"), text("models.last_hour")):
        upstreams = parts.html()
    with parts.section(text("models.aliases"), text("models.aliases_note")):
        aliases = ui.element("div").classes("aliases")
    with parts.section(text("models.models"), text("models.prices_note")):
        models = ui.element("div")

    async def refresh() -> None:
        live, by_upstream = await asyncio.gather(
            view.api.get("models"),
            view.api.get("usage", since=time.time() - SPAN_S, by="upstream", load_test=1),
        )
        used = {row["upstream"]: row for row in by_upstream["data"]}
        upstreams.content = Markup('<div class="cards">{}</div>').format(
            Markup("").join(_upstream(view, up, used.get(up["name"], {})) for up in live["upstreams"])
        )
        # What has inputs is made again only when it has changed: nobody wants a list to close under the mouse.
        steady = {name: live[name] for name in ("aliases", "models", "prices", "default_model")}
        if steady == known:
            return
        known.clear()
        known.update(steady)
        aliases.clear()
        with aliases:
            _aliases(view, live, refresh)
        models.clear()
        with models:
            _models(view, live, refresh)

    await refresh()
    view.every(REFRESH_S, refresh)


def _upstream(view: View, up: dict[str, Any], used: dict[str, Any]) -> Markup:
    text = view.text
    health = parts.badge(*((text("models.up"), "good") if up["healthy"] else (text("models.down"), "bad")))
    ttft = used.get("ttft_ms") or {}
    failed = used.get("error", 0) + used.get("aborted", 0)
    rows = [
        (text("models.load"), text("models.load_now", running=up["in_flight"], waiting=up["waiting"])),
        (text("models.expected"), figures.milliseconds(up["expected_ttft_ms"])),
        (
            "TTFT p50 / p95",
            f"{figures.milliseconds(ttft.get('p50'))} / {figures.milliseconds(ttft.get('p95'))}",
        ),
        (text("table.requests"), figures.count(used.get("requests", 0))),
        (text("table.failed"), figures.share(failed, used.get("requests", 0))),
        (
            text("models.cache_hits"),
            figures.share(used.get("cached_tokens", 0), used.get("prompt_tokens", 0)),
        ),
        (
            text("models.acceptance"),
            figures.share(used.get("accepted_tokens", 0), used.get("drafted_tokens", 0)),
        ),
        (text("table.models"), ", ".join(up["models"]) or figures.NOTHING),
    ]
    return Markup('<div class="small-card"><h3>{} {}</h3><p class="note address">{}</p>{}</div>').format(
        up["name"], health, up["base_url"], parts.facts(rows)
    )


Refresh = Callable[[], Awaitable[None]]


def _aliases(view: View, live: dict[str, Any], refresh: Refresh) -> None:
    if not live["aliases"]:
        parts.html(Markup('<p class="empty">{}</p>').format(view.text("models.no_aliases")))
    names = [model["name"] for model in live["models"]]
    for alias in live["aliases"]:
        _alias(view, alias, names, refresh)


def _alias(view: View, alias: dict[str, Any], names: list[str], refresh: Refresh) -> None:
    text = view.text
    path = f"models/aliases/{parts.quoted(alias['name'])}"

    async def switch(event: Any) -> None:
        await view.api.change("PUT", path, {"target": event.value})
        ui.notify(text("models.switched", name=alias["name"], target=event.value), type="positive")
        await refresh()

    async def back() -> None:
        await view.api.change("DELETE", path)
        await refresh()

    with ui.element("div").classes("alias"):
        ui.label(alias["name"]).classes("alias-name")
        ui.icon("arrow_forward").classes("arrow")
        options = names if alias["target"] in names else [*names, alias["target"]]
        parts.select(text("table.model"), options, alias["target"], view.act(switch)).classes("alias-target")
        if alias["fallbacks"]:
            ui.label(text("models.fallbacks", names=", ".join(alias["fallbacks"]))).classes("note")
        if alias["switched"]:
            parts.html(parts.badge(text("models.switched_here"), "warn"))
            ui.button(text("models.back"), on_click=view.act(back)).props("flat dense no-caps")


async def _ask_for_alias(view: View, models: list[dict[str, Any]]) -> bool:
    text = view.text
    names = [model["name"] for model in models]
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(text("models.new_alias")).classes("dialog-title")
        name = parts.field(text("table.name")).props("autofocus maxlength=100")
        target = parts.select(text("table.model"), names, names[0] if names else None)

        async def save() -> None:
            path = f"models/aliases/{parts.quoted((name.value or '').strip())}"
            await view.api.change("PUT", path, {"target": target.value})

        parts.dialog_buttons(view, dialog, save, text("models.new_alias"))
    return await parts.answered(dialog)


def _models(view: View, live: dict[str, Any], refresh: Refresh) -> None:
    text = view.text
    columns = [
        Column(text("table.model")),
        Column(text("models.upstreams")),
        Column(text("models.price_prompt"), number=True),
        Column(text("models.price_cached"), number=True, wide_only=True),
        Column(text("models.price_completion"), number=True),
    ]
    rows = []
    for model in live["models"]:
        price = live["prices"].get(model["name"], {})
        name: parts.Cell = model["name"]
        if name == live["default_model"]:
            name = Markup("{} {}").format(name, parts.badge(text("models.default"), "plain"))
        prices = [
            f"{price[kind]:g}" if price else figures.NOTHING for kind in ("prompt", "cached", "completion")
        ]
        rows.append((name, ", ".join(model["upstreams"]), *prices))
    parts.html(parts.table(columns, rows, text("models.none")))

    async def set_price() -> None:
        if await _ask_for_price(view, live):
            await refresh()

    if live["models"]:
        ui.button(text("models.set_price"), on_click=view.act(set_price)).props("flat dense no-caps")


async def _ask_for_price(view: View, live: dict[str, Any]) -> bool:
    text = view.text
    names = [model["name"] for model in live["models"]]
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(text("models.set_price")).classes("dialog-title")
        model = parts.select(text("table.model"), names, names[0])
        with ui.element("div").classes("pair"):
            inputs = {
                kind: ui.number(label=text(f"models.price_{kind}"), min=0).props("outlined dense")
                for kind in ("prompt", "cached", "completion")
            }

        def show() -> None:
            for kind, made in inputs.items():
                made.value = live["prices"].get(model.value, {}).get(kind)

        async def save() -> None:
            price = {kind: made.value for kind, made in inputs.items() if made.value is not None}
            method = "PUT" if price else "DELETE"
            await view.api.change(method, f"models/prices/{parts.quoted(model.value)}", price or None)

        model.on_value_change(show)
        show()
        parts.dialog_buttons(view, dialog, save, text("frame.save"))
    return await parts.answered(dialog)
