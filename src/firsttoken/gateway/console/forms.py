"""The dialogs that make and change keys and plans, and the one that shows a secret, this once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from nicegui import ui

from firsttoken.gateway.console import figures, parts
from firsttoken.gateway.console.client import Refused, segment
from firsttoken.gateway.console.frame import View

QUOTAS = ("quota_5h", "quota_week", "quota_month")
PRIORITIES = ("interactive", "agent", "load-test")
LIMITS = ("rpm", "tpm", "max_concurrency")


async def new_key(view: View) -> bool:
    """Asks for a key's fields, makes it and shows its secret; says whether one was made."""
    plans = [plan["name"] for plan in (await view.api.get("plans"))["data"]]
    made: dict[str, Any] = {}
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(view.text("keys.create")).classes("dialog-title")
        read = _key_fields(view, plans, {})
        admin = parts.checkbox(view.text("keys.make_admin"))

        async def save() -> None:
            values = read() | {"role": "admin" if admin.value else "client"}
            made.update(await view.api.change("POST", "keys", values))

        parts.dialog_buttons(view, dialog, save, view.text("keys.create"))
    await parts.answered(dialog)
    if made:
        await show_secret(view, made.pop("secret"), made["name"])
    return bool(made)


async def edit_key(view: View, key: dict[str, Any]) -> bool:
    plans = [plan["name"] for plan in (await view.api.get("plans"))["data"]]
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(view.text("keys.edit")).classes("dialog-title")
        read = _key_fields(view, plans, key)

        async def save() -> None:
            await view.api.change("PATCH", f"keys/{segment(key['id'])}", read())

        parts.dialog_buttons(view, dialog, save, view.text("frame.save"))
    return await parts.answered(dialog)


def _key_fields(view: View, plans: list[str], key: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """The inputs, and what reads them as the Admin API wants them."""
    text = view.text
    name = parts.field(text("table.name"), key.get("name", "")).props("autofocus maxlength=100")
    plan = parts.select(
        text("table.plan"), {"": text("keys.no_plan")} | {p: p for p in plans}, key.get("plan") or ""
    )
    models = parts.field(text("table.models"), ", ".join(key.get("models") or []), text("keys.models_hint"))
    with ui.element("div").classes("pair"):
        limits = {limit: parts.number(text(f"limits.{limit}"), key.get(limit)) for limit in LIMITS}
        expires = parts.field(text("keys.expires"), _day(key.get("expires_at"))).props(
            "type=date stack-label clearable"
        )
    load_test = parts.checkbox(text("keys.for_load_test"), key.get("load_test", False))

    def read() -> dict[str, Any]:
        tags = [tag for tag in key.get("tags", []) if tag != "load-test"]
        return {
            "name": (name.value or "").strip(),
            "plan": plan.value or None,
            "models": _list(models.value),
            "tags": [*tags, "load-test"] if load_test.value else tags,
            **{limit: _whole(made.value) for limit, made in limits.items()},
            "expires_at": _end_of_day(expires.value) if expires.value else None,
        }

    return read


async def edit_plan(view: View, plan: dict[str, Any] | None) -> bool:
    """Makes a plan, or changes `plan`; says whether."""
    text, old = view.text, plan or {}
    live = await view.api.get("models")
    names = {up["name"] for up in live["upstreams"]} | ({old["upstream"]} if old.get("upstream") else set())
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(text("plans.edit" if plan else "plans.create")).classes("dialog-title")
        name = parts.field(text("table.name"), old.get("name", "")).props("autofocus maxlength=100")
        priority = parts.select(
            text("plans.priority"),
            {p: text(f"priority.{p}") for p in PRIORITIES},
            old.get("priority", PRIORITIES[0]),
        )
        with ui.element("div").classes("pair"):
            quotas = {quota: parts.number(text(f"plans.{quota}"), old.get(quota)) for quota in QUOTAS}
        models = parts.field(
            text("table.models"), ", ".join(old.get("models") or []), text("keys.models_hint")
        )
        anywhere = {"": text("plans.any_upstream")}
        upstreams = anywhere | {name: name for name in sorted(names)}
        upstream = parts.select(text("plans.upstream"), upstreams, old.get("upstream") or "")

        async def save() -> None:
            values = {
                "name": (name.value or "").strip(),
                "priority": priority.value,
                "models": _list(models.value),
                "upstream": upstream.value or None,
                **{quota: _whole(made.value) for quota, made in quotas.items()},
            }
            if plan:
                await view.api.change("PATCH", f"plans/{segment(plan['name'])}", values)
            else:
                await view.api.change("POST", "plans", values)

        parts.dialog_buttons(view, dialog, save, text("frame.save" if plan else "plans.create"))
    return await parts.answered(dialog)


async def show_secret(view: View, secret: str, name: str) -> None:
    """The one time that a key is seen. It is taken from the page when the dialog closes, and is in no HTML."""
    text = view.text
    with ui.dialog().props("persistent") as dialog, ui.card().classes("dialog"):
        ui.label(text("keys.made", name=name)).classes("dialog-title")
        ui.label(text("keys.shown_once"))
        shown = ui.label(secret).classes("secret").mark("secret")
        with ui.element("div").classes("buttons"):
            # In the browser, within the click: some browsers let no script copy at another time.
            copy = ui.button(text("frame.copy"), icon="content_copy").props("flat no-caps")
            copy.on(
                "click",
                js_handler=f"() => navigator.clipboard?.writeText(getHtmlElement({shown.id}).innerText)",
            )
            ui.button(text("keys.kept"), on_click=dialog.close).props("unelevated no-caps")
    await parts.answered(dialog)


def _list(words: str | None) -> list[str] | None:
    """'a, b' → [a, b]; nothing → None (every model)."""
    names = [name.strip() for name in (words or "").split(",")]
    return [name for name in names if name] or None


def _whole(value: float | None) -> float | int | None:
    """A whole number as one; others stay, for the gateway to refuse by name."""
    return int(value) if value is not None and value == int(value) else value


def _day(at: float | None) -> str:
    return "" if at is None else figures.day(at)


def _end_of_day(day: str) -> float:
    try:
        return datetime.fromisoformat(day).replace(hour=23, minute=59, second=59).timestamp()
    except ValueError:
        raise Refused(f"{day!r} is no date") from None
