"""Signing in and out: two plain routes and one plain page, without NiceGUI.

Whoever has an admin key of the gateway may enter. The gateway judges the key; the console only counts failures.
"""

from __future__ import annotations

import hmac
import logging
import math
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from markupsafe import Markup

from firsttoken.gateway.console.client import Gateway, Refused
from firsttoken.gateway.console.guard import SIGN_IN, prefix, session_of, set_cookie
from firsttoken.gateway.console.language import LANGUAGES, Text
from firsttoken.gateway.console.preferences import Preferences
from firsttoken.gateway.console.sessions import Attempts, Sessions

log = logging.getLogger("firsttoken.gateway.console")

SIGN_OUT = "/sign-out"
MAX_FORM_BYTES = 8192

PAGE = Markup(
    """<!doctype html>
<html lang="{language}" data-theme="{theme}">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · firsttoken</title>
<link rel="icon" href="{prefix}/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="{prefix}/static/console.css">
<script src="{prefix}/static/console.js"></script>
</head>
<body class="sign-in">
<main>
  <form method="post" action="{prefix}/sign-in">
    <div class="brand"><img src="{prefix}/static/icon.svg" alt="">firsttoken</div>
    <h1>{title}</h1>
    <label for="key">{label}</label>
    <input id="key" name="key" type="password" autocomplete="current-password" spellcheck="false" required autofocus>
    {problem}
    <button type="submit">{button}</button>
    <p class="hint">{hint}</p>
  </form>
  <nav class="languages">{languages}</nav>
</main>
</body>
</html>
"""
)
PROBLEM = Markup('<p class="problem" role="alert">{}</p>')
LANGUAGE = Markup("<button type=\"button\" onclick=\"prefer('language', '{}')\">{}</button>")


def register(app: FastAPI, gateway: Gateway, sessions: Sessions, attempts: Attempts) -> None:
    @app.get(SIGN_IN)
    async def show(request: Request) -> Response:
        if session_of(request.scope) is not None:
            return RedirectResponse(prefix(request.scope) + "/", 303)
        return _page(request)

    @app.post(SIGN_IN)
    async def sign_in(request: Request) -> Response:
        text = Text(Preferences.of(request).language)
        address = request.client.host if request.client else ""
        if wait := attempts.wait(address):
            minutes = math.ceil(wait / 60)
            refusal = _page(request, text("sign_in.too_many", minutes=minutes), 429)
            refusal.headers["Retry-After"] = str(math.ceil(wait))
            return refusal
        key = (await _form(request)).get("key", "").strip()
        attempts.begin(address)
        if not key.isascii() or not key.isprintable() or not key:
            return _page(request, text("sign_in.wrong"), 403)
        try:
            owner = await gateway.call(key, "GET", "/admin/v1/me", {})
        except Refused as trouble:
            if trouble.status in (401, 403):
                log.warning("failed sign-in from %s", address)
                return _page(request, text("sign_in.wrong"), 403)
            attempts.succeeded(address)
            return _page(request, text("sign_in.gateway", message=trouble), 502)
        attempts.succeeded(address)
        if (old := session_of(request.scope)) is not None:
            sessions.end(old)
        name, _ = sessions.start(key, owner["name"])
        answer = RedirectResponse(prefix(request.scope) + "/", 303)
        answer.headers.append("set-cookie", set_cookie(request.scope, name))
        return answer

    @app.post(SIGN_OUT)
    async def sign_out(request: Request) -> Response:
        session = session_of(request.scope)
        if session is None or not _same((await _form(request)).get("token", ""), session.token):
            return Response("This form is not from the console.", 403)
        sessions.end(session)
        answer = RedirectResponse(prefix(request.scope) + SIGN_IN, 303)
        answer.headers.append("set-cookie", set_cookie(request.scope, "", 0))
        return answer


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            return {}
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _page(request: Request, problem: str | None = None, status: int = 200) -> HTMLResponse:
    preferences = Preferences.of(request)
    text = Text(preferences.language)
    html = PAGE.format(
        language=preferences.language,
        theme=preferences.theme,
        prefix=prefix(request.scope),
        title=text("sign_in.title"),
        label=text("sign_in.key"),
        button=text("sign_in.button"),
        hint=text("sign_in.hint"),
        problem=PROBLEM.format(problem) if problem else "",
        languages=Markup("").join(LANGUAGE.format(code, name) for code, name in LANGUAGES.items()),
    )
    return HTMLResponse(html, status)
