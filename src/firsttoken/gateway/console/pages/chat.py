"""Chat: answers stream in, with their TTFT and speed beside them; two models can answer side by side.

Talks stay in this page: closing it forgets them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from nicegui import ui

from firsttoken.gateway.console import figures, parts
from firsttoken.gateway.console.client import Answer, Refused, SignedOut
from firsttoken.gateway.console.frame import View
from firsttoken.gateway.console.guard import SIGN_IN

DRAW_S = 0.04
"""Between redrawings of an answer: the eye sees no more, and a phone has other things to do."""


async def build(view: View) -> None:
    text = view.text
    live = await view.api.get("models")
    names = [*(alias["name"] for alias in live["aliases"]), *(model["name"] for model in live["models"])]
    names = list(dict.fromkeys(names))
    with parts.title(text("chat.title")):
        tokens = parts.number(text("chat.max_tokens"), 512).props(remove="clearable").classes("max-tokens")
        compare = parts.switch(text("chat.compare"))
        clear = ui.button(text("chat.clear"), icon="refresh").props("flat no-caps dense")
    panes_at = ui.element("div").classes("panes")
    default = live["default_model"] if live["default_model"] in names else next(iter(names), None)
    with panes_at:
        panes = [Pane(view, names, default), Pane(view, names, names[1] if len(names) > 1 else default)]
    with ui.element("div").classes("composer"):
        words = ui.textarea(placeholder=text("chat.placeholder")).props(
            "outlined autogrow dense autofocus rows=1"
        )
        send = ui.button(icon="arrow_upward").props(f'round unelevated aria-label="{text("chat.send")}"')
        stop = ui.button(icon="stop").props(f'round outline aria-label="{text("chat.stop")}"')
    stop.visible = False
    running: list[asyncio.Task[None]] = []

    def arrange() -> None:
        panes[1].box.visible = compare.value
        panes_at.classes(add="two") if compare.value else panes_at.classes(remove="two")

    async def ask() -> None:
        prompt = (words.value or "").strip()
        if not prompt or running:
            return
        words.value = ""
        send.visible, stop.visible = False, True
        asked = panes if compare.value else panes[:1]
        limit = int(tokens.value) if tokens.value else None
        # Together, so that the two are timed under the same conditions.
        running.extend(asyncio.create_task(pane.ask(prompt, limit)) for pane in asked)
        try:
            done = await asyncio.gather(*running, return_exceptions=True)
        finally:
            end()
            running.clear()
        if panes_at.is_deleted:  # the page was closed meanwhile
            return
        send.visible, stop.visible = True, False
        for outcome in done:
            if isinstance(outcome, SignedOut):
                ui.navigate.to(view.href(SIGN_IN))
            elif isinstance(outcome, Exception):
                raise outcome

    def end() -> None:
        for task in running:
            task.cancel()

    def forget() -> None:
        end()
        for pane in panes:
            pane.forget()

    compare.on_value_change(arrange)
    clear.on_click(forget)
    send.on_click(view.act(ask))
    stop.on_click(end)
    # Enter sends, Shift+Enter makes a line; Enter that ends a word in an input method is neither.
    words.on(
        "keydown",
        view.act(ask),
        js_handler="(event) => { if (event.key === 'Enter' && !event.shiftKey && !event.isComposing)"
        " { event.preventDefault(); emit(); } }",
    )
    ui.context.client.on_delete(end)
    arrange()


@dataclass(slots=True)
class Pane:
    """One model's side of the talk."""

    view: View
    names: list[str]
    model: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    box: ui.element = field(init=False)
    talk: ui.element = field(init=False)
    chosen: ui.select = field(init=False)

    def __post_init__(self) -> None:
        with ui.element("section").classes("pane") as self.box:
            self.chosen = parts.select(self.view.text("table.model"), self.names, self.model).classes(
                "pane-model"
            )
            self.talk = ui.element("div").classes("talk").props("aria-live=polite")
            self._greet()

    def _greet(self) -> None:
        with self.talk:
            ui.label(self.view.text("chat.empty")).classes("empty")

    def forget(self) -> None:
        self.messages.clear()
        self.talk.clear()
        self._greet()

    async def ask(self, prompt: str, max_tokens: int | None) -> None:
        """Sends the talk so far and shows the answer as it comes."""
        text = self.view.text
        if not self.messages:
            self.talk.clear()
        self.messages.append({"role": "user", "content": prompt})
        with self.talk:
            ui.label(prompt).classes("said")
            with ui.element("div").classes("answer"):
                shown = ui.label().classes("answer-text waiting")
                measured = ui.label(text("chat.waiting")).classes("measured")
        body: dict[str, Any] = {"model": self.chosen.value, "messages": self.messages}
        if max_tokens:
            body["max_tokens"] = max_tokens
        answer, problem, drawn = Answer(), "", 0.0
        try:
            async for answer in self.view.api.chat(body):
                first = bool(answer.text) and not shown.text
                if first or time.monotonic() - drawn >= DRAW_S:
                    drawn = time.monotonic()
                    self._draw(shown, measured, answer)
        except Refused as refusal:
            problem = str(refusal)
        except asyncio.CancelledError:
            problem = text("chat.stopped")
        if self.box.is_deleted:
            return
        self._draw(shown, measured, answer)
        shown.classes(remove="waiting")
        if problem:
            with self.talk:
                ui.label(problem).classes("problem").props("role=alert")
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()  # an unanswered question would make two of the user's turns meet

    def _draw(self, shown: ui.label, measured: ui.label, answer: Answer) -> None:
        if not answer.text:
            return
        text = self.view.text
        shown.text = answer.text
        figures_of = [f"TTFT {figures.milliseconds(answer.ttft_ms)}"]
        if answer.tokens_per_second is not None:
            figures_of.append(f"{figures.rate(answer.tokens_per_second)} {text('unit.tokens_per_second')}")
        figures_of.append(text("chat.tokens", count=figures.count(answer.tokens)))
        measured.text = " · ".join(figures_of)
