"""One request: where its time went, part by part, and everything else that is known of it."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console import figures, parts
from firsttoken.gateway.console.client import segment
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.pages.requests import PARTS, bar, shares


async def build(view: View) -> None:
    text = view.text
    row = await view.api.get(f"requests/{segment(view.request.path_params['id'])}")
    key = next(
        (one for one in (await view.api.get("keys", revoked=1))["data"] if one["id"] == row["key_id"]), None
    )
    with parts.title(text("request.title"), (view.href("/requests"), text("requests.title"))):
        parts.html(parts.status(view, row["status"]))
    with ui.element("div").classes("columns uneven"):
        with parts.section(text("requests.where"), text("request.where_note")):
            parts.html(_time(view, row))
        with parts.section(text("request.about")):
            parts.html(parts.facts(_facts(view, row, key["name"] if key else row["key_id"])))


def _time(view: View, row: dict[str, Any]) -> Markup:
    known = shares(row)
    if not known:
        return Markup('<p class="empty">{}</p>').format(view.text("request.no_times"))
    rows = [
        (
            Markup('<i class="dot part-{}"></i>{}<small>{}</small>').format(
                name, view.text(f"part.{name}"), view.text(f"part.{name}_note")
            ),
            figures.milliseconds(row["parts"][name]),
        )
        for name in PARTS
    ]
    sums = [
        ("TTFT", figures.milliseconds(row["ttft_ms"])),
        (view.text("table.duration"), figures.milliseconds(row["duration_ms"])),
    ]
    return Markup('<div class="long-bar">{}</div><div class="times">{}{}</div>').format(
        bar(view, row, sum(known.values())), parts.facts(rows), parts.facts(sums)
    )


def _facts(view: View, row: dict[str, Any], key: str) -> list[tuple[str, parts.Cell]]:
    text = view.text
    speed = None
    if row["ttft_ms"] is not None and row["duration_ms"] and (row["completion_tokens"] or 0) > 1:
        decoding = row["duration_ms"] - row["ttft_ms"]
        speed = (row["completion_tokens"] - 1) / decoding * 1e3 if decoding > 0 else None
    facts: list[tuple[str, parts.Cell | None]] = [
        (text("table.time"), parts.when(row["started_at"])),
        (text("table.key"), parts.link(view, f"/keys/{segment(row['key_id'])}", key)),
        (text("request.endpoint"), row["endpoint"]),
        (text("request.asked"), row["alias"]),
        (text("table.model"), row["model"]),
        (text("table.upstream"), row["upstream"]),
        (text("request.attempts"), str(row["attempts"])),
        (text("request.stream"), text("request.yes" if row["stream"] else "request.no")),
        (text("request.http_status"), str(row["http_status"] or "")),
        (text("request.error"), row["error"]),
        (text("table.prompt_tokens"), figures.count(row["prompt_tokens"])),
        (text("table.cached"), figures.share(row["cached_tokens"] or 0, row["prompt_tokens"] or 0)),
        (text("table.output_tokens"), figures.count(row["completion_tokens"])),
        (
            text("chat.speed_name"),
            f"{figures.rate(speed)} {text('unit.tokens_per_second')}" if speed else None,
        ),
        (text("models.acceptance"), figures.share(row["accepted_tokens"] or 0, row["drafted_tokens"] or 0)),
        (text("table.spend"), figures.money(row["cost_nano"] or 0)),
        (text("request.id"), Markup("<code>{}</code>").format(row["id"])),
        (text("request.client_id"), row["client_id"]),
    ]
    return [(name, value) for name, value in facts if value]
