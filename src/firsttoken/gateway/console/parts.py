"""The pieces that pages are made of. What comes from elsewhere is escaped by Markup wherever it becomes HTML."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import figures
from firsttoken.gateway.console.client import Refused
from firsttoken.gateway.console.frame import View

SPANS: dict[str, tuple[float, int]] = {
    "15m": (900, 60),
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (86_400, 900),
    "7d": (7 * 86_400, 86_400),
    "30d": (30 * 86_400, 86_400),
}
"""Name of a span → its length, and the width of a point in its charts (both in seconds)."""

Cell = str | Markup


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    number: bool = False
    wide_only: bool = False
    """Left out on a phone."""
    whole_row: bool = False
    """On a phone, as wide as the card and without its head."""


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], empty: str) -> Markup:
    """A table; on a phone each row becomes a card of its own, with the heads beside the values."""
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td class="{}" data-head="{}">{}</td>').format(_classes(column), column.head, cell)
                for column, cell in zip(columns, row, strict=True)
            )
        )
        for row in rows
    )
    if not body:
        return Markup('<p class="empty">{}</p>').format(empty)
    heads = Markup("").join(
        Markup('<th class="{}">{}</th>').format(_classes(column), column.head) for column in columns
    )
    return Markup('<table class="table"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>').format(
        heads, body
    )


def _classes(column: Column) -> str:
    return " ".join(
        name
        for name, on in (
            ("number", column.number),
            ("wide-only", column.wide_only),
            ("whole-row", column.whole_row),
        )
        if on
    )


def link(view: View, path: str, words: Cell, title: str = "") -> Markup:
    return Markup('<a href="{}" title="{}">{}</a>').format(view.href(path), title, words)


def when(at: float | None) -> Cell:
    """A moment, which `console.js` writes in the local time of whoever looks."""
    if at is None:
        return figures.NOTHING
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    return Markup('<time datetime="{}" data-at="{:.0f}">{}</time>').format(utc, at * 1e3, utc)


def badge(words: str, kind: str) -> Markup:
    """`kind`: good, bad, warn or plain."""
    return Markup('<span class="badge {}">{}</span>').format(kind, words)


def quoted(value: str | None) -> str:
    """A value in a link's query."""
    return quote(value or "", safe="")


STATUS_KINDS = {"ok": "good", "error": "bad", "aborted": "warn", "limited": "warn", "running": "plain"}


def status(view: View, name: str) -> Markup:
    return badge(view.text(f"status.{name}"), STATUS_KINDS.get(name, "plain"))


def html(content: str = "") -> ui.html:
    """Markup of our own making (see `table`), which needs no cleaning in the browser."""
    return ui.html(content, sanitize=False)


def title(words: str, back: tuple[str, str] | None = None, note: str = "") -> ui.element:
    """A page's head line; what is made within goes to its right end. `back`: address and words of the way up."""
    head = ui.element("header").classes("head")
    with head:
        with ui.element("div").classes("head-words"):
            if back:
                html(Markup('<a class="back" href="{}">‹ {}</a>').format(*back))
            html(Markup("<h1>{}</h1>").format(words))
            if note:
                html(Markup('<p class="note">{}</p>').format(note))
        return ui.element("div").classes("head-actions")


def section(words: str, note: str = "") -> ui.element:
    """A card with a heading."""
    card = ui.element("section").classes("card")
    with card:
        head = Markup('<h2>{}</h2><p class="note">{}</p>' if note else "<h2>{}</h2>").format(words, note)
        html(head).classes("card-head")
    return card


@dataclass(slots=True)
class Tile:
    """One figure with its name and a line of context."""

    value: ui.label
    note: ui.label

    def show(self, value: str, note: str = "") -> None:
        self.value.text, self.note.text = value, note


def tile(name: str) -> Tile:
    with ui.element("div").classes("tile"):
        ui.label(name).classes("tile-name")
        return Tile(ui.label(figures.NOTHING).classes("tile-value"), ui.label("").classes("tile-note"))


def facts(rows: Iterable[tuple[str, Cell]]) -> Markup:
    """Names and values, one a line."""
    return Markup('<dl class="facts">{}</dl>').format(
        Markup("").join(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(*row) for row in rows)
    )


def meter(part: float, whole: float, words: str) -> Markup:
    """A bar of how much of something is used."""
    filled = min(100.0, 100 * part / whole) if whole else 100.0
    kind = "bad" if filled >= 95 else "warn" if filled >= 80 else "good"
    return Markup(
        '<div class="meter"><div class="fill {}" style="width:{:.1f}%"></div></div><small>{}</small>'
    ).format(kind, filled, words)


# ---------------------------------------------------------------- choosing what is shown


def choose_span(view: View, current: str, changed: Callable[[str], Awaitable[None]]) -> ui.toggle:
    options = {name: view.text(f"span.{name}") for name in SPANS}
    return (
        ui.toggle(options, value=current, on_change=view.act(lambda event: changed(event.value)))
        .props("unelevated no-caps dense")
        .classes("spans")
    )


def since(span: str) -> float:
    return time.time() - SPANS[span][0]


def select(
    label: str, options: dict[str, str] | list[str], value: Any, changed: Callable[..., Any] | None = None
) -> ui.select:
    return ui.select(options, label=label, value=value, on_change=changed).props(
        "outlined dense options-dense"
    )


def switch(label: str, value: bool = False, changed: Callable[..., Any] | None = None) -> ui.switch:
    made = ui.switch(label, value=value, on_change=changed).props("dense")
    return made.props(f"aria-label={json.dumps(label)}")


def checkbox(label: str, value: bool = False) -> ui.checkbox:
    return ui.checkbox(label, value=value).props("dense").props(f"aria-label={json.dumps(label)}")


def field(label: str, value: str = "", hint: str = "") -> ui.input:
    made = ui.input(label=label, value=value).props("outlined dense")
    return made.props(f"hint={json.dumps(hint)}") if hint else made


def number(label: str, value: float | None, hint: str = "") -> ui.number:
    made = ui.number(label=label, value=value, min=0, precision=0).props("outlined dense clearable")
    return made.props(f"hint={json.dumps(hint)}") if hint else made


async def confirm(view: View, question: str, button: str) -> bool:
    with ui.dialog() as dialog, ui.card().classes("dialog"):
        ui.label(question)
        with ui.element("div").classes("buttons"):
            ui.button(view.text("frame.cancel"), on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button(button, on_click=lambda: dialog.submit(True), color="negative").props(
                "unelevated no-caps"
            )
    return await answered(dialog)


async def answered(dialog: ui.dialog) -> bool:
    """Waits for a dialog's end and takes it from the page; says whether it was agreed to."""
    agreed = bool(await dialog)
    if not dialog.is_deleted:  # else the whole page is gone
        dialog.delete()
    return agreed


def dialog_buttons(view: View, dialog: ui.dialog, save: Callable[[], Awaitable[None]], words: str) -> None:
    """Cancel and save; what the gateway refuses is said in the dialog, which stays open."""
    problem = ui.label().classes("problem").props("role=alert")
    problem.visible = False

    async def try_to_save() -> None:
        try:
            await save()
        except Refused as refusal:
            problem.text, problem.visible = str(refusal), True
        else:
            dialog.submit(True)

    with ui.element("div").classes("buttons"):
        ui.button(view.text("frame.cancel"), on_click=lambda: dialog.submit(False)).props("flat no-caps")
        ui.button(words, on_click=view.act(try_to_save)).props("unelevated no-caps")
