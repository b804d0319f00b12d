"""The console's application: the guard, the sign-in, static files, and NiceGUI's pages behind them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from nicegui import ui
from starlette.staticfiles import StaticFiles

from firsttoken.gateway.console import frame, signin
from firsttoken.gateway.console.client import Gateway
from firsttoken.gateway.console.guard import HEALTH, Guard
from firsttoken.gateway.console.pages import chat, key, keys, models, overview, request, requests
from firsttoken.gateway.console.sessions import Attempts, Sessions

PAGES = (
    ("/", "overview", overview.build),
    ("/keys", "keys", keys.build),
    ("/keys/{id}", "keys", key.build),
    ("/models", "models", models.build),
    ("/requests", "requests", requests.build),
    ("/requests/{id}", "requests", request.build),
    ("/chat", "chat", chat.build),
)
"""Address, the entry of the navigation that it belongs to, and what makes it."""
STATIC = Path(__file__).with_name("static")


@dataclass(slots=True)
class Console:
    """What all pages share."""

    gateway: Gateway
    sessions: Sessions = field(default_factory=Sessions)
    attempts: Attempts = field(default_factory=Attempts)


def make_app(console: Console) -> Guard:
    """The ASGI application. Once per process: NiceGUI's pages are registered globally."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await console.gateway.start()
        yield
        await console.gateway.stop()

    app = FastAPI(
        title="firsttoken console", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.get(HEALTH)
    async def health() -> PlainTextResponse:
        return PlainTextResponse("ok")

    signin.register(app, console.gateway, console.sessions, console.attempts)
    app.mount("/static", StaticFiles(directory=STATIC))
    for path, name, build in PAGES:
        frame.page(console.gateway, console.sessions, path, name, build)
    ui.run_with(
        app,
        title="firsttoken",
        favicon=STATIC / "icon.svg",
        tailwind=False,
        show_welcome_message=False,
        reconnect_timeout=5.0,
    )
    return Guard(app, console.sessions)
