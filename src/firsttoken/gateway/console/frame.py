"""What every page has: navigation, language and theme, one way to load, one way to act, one way to fail."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import RedirectResponse
from markupsafe import Markup
from nicegui import ui

from firsttoken.gateway.console.client import Api, Gateway, Refused, SignedOut
from firsttoken.gateway.console.guard import SIGN_IN, prefix, session_of
from firsttoken.gateway.console.language import LANGUAGES, Text
from firsttoken.gateway.console.preferences import THEMES, Preferences
from firsttoken.gateway.console.sessions import Sessions
from firsttoken.gateway.console.signin import SIGN_OUT

PAGES = (
    ("overview", "/", "insights"),
    ("keys", "/keys", "key"),
    ("models", "/models", "hub"),
    ("requests", "/requests", "format_list_bulleted"),
    ("chat", "/chat", "chat_bubble_outline"),
)
"""Name, path and icon of each page, in the order of the navigation."""
THEME_ICONS = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}
BUILD_LIMIT_S = 30.0
"""A page may ask the gateway several things, each with a limit of its own."""

T = TypeVar("T")


@dataclass(slots=True)
class View:
    """One page in one browser: whose it is, in which words, and how it reaches the gateway."""

    api: Api
    text: Text
    preferences: Preferences
    prefix: str
    request: Request

    def href(self, path: str) -> str:
        return self.prefix + path

    def parameter(self, name: str, default: str = "") -> str:
        """From the page's address."""
        return self.request.query_params.get(name, default)

    def act(self, what: Callable[..., Awaitable[Any] | Any]) -> Callable[..., Awaitable[None]]:
        """An event's handler that says what went wrong, and leads to the sign-in when the session has ended."""

        takes_event = bool(inspect.signature(what).parameters)

        async def handler(event: Any) -> None:
            try:
                result = what(event) if takes_event else what()
                if inspect.isawaitable(result):
                    await result
            except SignedOut:
                ui.navigate.to(self.href(SIGN_IN))
            except Refused as refusal:
                ui.notify(str(refusal), type="negative", multi_line=True)

        return handler

    def every(self, seconds: float, refresh: Callable[[], Awaitable[None]]) -> None:
        """Calls `refresh` again and again; when that fails a line says so until it works again."""
        trouble = ui.label().classes("trouble").props("role=status")
        trouble.visible = False

        async def once() -> None:
            try:
                await refresh()
                trouble.visible = False
            except SignedOut:
                ui.navigate.to(self.href(SIGN_IN))
            except Refused as refusal:
                trouble.text, trouble.visible = self.text("frame.trouble", message=refusal), True

        ui.timer(seconds, once, immediate=False)


Build = Callable[[View], Awaitable[None]]


def page(gateway: Gateway, sessions: Sessions, path: str, name: str, build: Build) -> None:
    """Registers a page. `name` is one of PAGES, or of a page below it."""

    @ui.page(path, response_timeout=BUILD_LIMIT_S)
    async def handler(request: Request) -> RedirectResponse | None:
        session = session_of(request.scope)
        preferences = Preferences.of(request)
        here = prefix(request.scope)
        if session is None:  # the guard has answered already; this is for whoever removes it
            return RedirectResponse(here + SIGN_IN, 303)
        text = Text(preferences.language)
        view = View(Api(gateway, sessions, session), text, preferences, here, request)
        try:
            with _frame(view, name):
                try:
                    await build(view)
                except Refused as refusal:
                    ui.label(text("frame.trouble", message=refusal)).classes("trouble").props("role=alert")
        except SignedOut:
            return RedirectResponse(here + SIGN_IN, 303)
        return None


@contextlib.contextmanager
def _frame(view: View, current: str) -> Iterator[None]:
    _head(view, current)
    with ui.element("div").classes("shell"):
        with ui.element("aside").classes("side"):
            with ui.element("a").classes("brand").props(f'href="{view.href("/")}"'):
                ui.html(Markup('<img src="{}" alt="">').format(view.href("/static/icon.svg")), sanitize=False)
                ui.label("firsttoken")
            with ui.element("nav").props(f'aria-label="{view.text("frame.pages")}"'):
                for name, path, icon in PAGES:
                    link = ui.element("a").props(f'href="{view.href(path)}"').classes("link")
                    if name == current:
                        link.classes("here").props("aria-current=page")
                    with link:
                        ui.icon(icon)
                        ui.label(view.text(f"{name}.nav"))
            _settings(view)
        with ui.element("div").classes("main"):
            yield


def _head(view: View, current: str) -> None:
    title = Markup.escape(view.text(f"{current}.title"))
    ui.page_title(f"{title} · firsttoken")
    # Set before anything is drawn, or a dark page would flash white.
    ui.add_head_html(
        f'<script>document.documentElement.dataset.theme="{view.preferences.theme}";'
        f'document.documentElement.lang="{view.preferences.language}"</script>'
        f'<link rel="stylesheet" href="{view.href("/static/console.css")}">'
        f'<script src="{view.href("/static/console.js")}"></script>'
    )
    ui.colors(primary="#0f766e", positive="#0f766e", negative="#c2413b", dark="#16181c", dark_page="#0f1114")
    ui.dark_mode({"auto": None, "light": False, "dark": True}[view.preferences.theme])


def _settings(view: View) -> None:
    with ui.element("div").classes("settings"):
        with (
            ui.button(icon="translate", color=None).props(
                f'flat round dense aria-label="{view.text("frame.language")}"'
            ),
            ui.menu(),
        ):
            for code, name in LANGUAGES.items():
                ui.menu_item(name, _preference("language", code)).classes(
                    "chosen" if code == view.preferences.language else ""
                )
        icon = THEME_ICONS[view.preferences.theme]
        with (
            ui.button(icon=icon, color=None).props(
                f'flat round dense aria-label="{view.text("frame.theme")}"'
            ),
            ui.menu(),
        ):
            for theme in THEMES:
                ui.menu_item(view.text(f"theme.{theme}"), _preference("theme", theme)).classes(
                    "chosen" if theme == view.preferences.theme else ""
                )
        with (
            ui.button(icon="account_circle", color=None).props(
                f'flat round dense aria-label="{view.text("frame.account")}"'
            ),
            ui.menu(),
        ):
            ui.label(view.api.session.owner).classes("owner")
            with ui.element("form").props(f'method="post" action="{view.href(SIGN_OUT)}"'):
                ui.element("input").props(f'type=hidden name=token value="{view.api.session.token}"')
                with ui.element("button").props("type=submit").classes("sign-out"):
                    ui.label(view.text("frame.sign_out"))


def _preference(name: str, value: str) -> Callable[[], Any]:
    return lambda: ui.run_javascript(f"prefer('{name}', '{value}')")
