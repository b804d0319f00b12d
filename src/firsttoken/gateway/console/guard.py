"""What stands before every page: the session, the origin of what wants to change something, safe headers.

One seam for HTTP and WebSocket alike. Without a session a page is answered with the way to the sign-in, anything
else with 401. What could change something must come from a page of this console: its `Origin` names our own host.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from firsttoken.gateway.console.sessions import LIFE_S, Session, Sessions

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION = "console.session"
"""Where pages find their Session in the ASGI scope."""
SIGN_IN = "/sign-in"
HEALTH = "/health"
STATIC = "/static/"
READING = ("GET", "HEAD")

HEADERS = [
    (
        b"content-security-policy",
        # Vue compiles its templates in the browser, hence 'unsafe-eval'. Nothing may be fetched from or sent to
        # anywhere else, so even a script that slipped through could not carry a key away.
        b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        b"img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; "
        b"base-uri 'self'; form-action 'self'; object-src 'none'",
    ),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
]


class Guard:
    def __init__(self, app: App, sessions: Sessions):
        self.app, self.sessions = app, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        changing = scope["type"] == "websocket" or scope["method"] not in READING
        if changing and not same_origin(scope):
            await _refuse(scope, receive, send, 403, b"This request does not come from the console itself.")
            return
        session = self.sessions.find(cookie(scope, cookie_name(scope)))
        scope[SESSION] = session
        public = path in (SIGN_IN, HEALTH) or path.startswith(STATIC)
        if session is None and not public:
            page = scope["type"] == "http" and scope["method"] in READING and not path.startswith("/_nicegui")
            if page:
                await _redirect(send, prefix(scope) + SIGN_IN)
            else:
                await _refuse(scope, receive, send, 401, b"Sign in first.")
            return
        if session is not None and scope["type"] == "http" and not path.startswith(("/_nicegui", STATIC)):
            self.sessions.touch(session)
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
        else:
            await self._answer(scope, receive, _safely(send, path))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Middlewares around NiceGUI's pages raise when a browser leaves before its answer: that is no error."""
        left = False

        async def watched() -> Message:
            nonlocal left
            message = await receive()
            left = left or message["type"] == "http.disconnect"
            return message

        try:
            await self.app(scope, watched, send)
        except RuntimeError:
            if not left:
                raise


def _safely(send: Send, path: str) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *HEADERS]
            if not path.startswith(("/_nicegui", STATIC)):
                headers = [(name, value) for name, value in headers if name.lower() != b"cache-control"]
                headers.append((b"cache-control", b"no-store"))
            message["headers"] = headers
        await send(message)

    return with_headers


# ---------------------------------------------------------------- what a request says


def header(scope: Scope, name: bytes) -> str:
    for known, value in scope["headers"]:
        if known == name:
            return str(value.decode("latin-1"))
    return ""


def same_origin(scope: Scope) -> bool:
    """Whether the page that sends this is ours. Browsers name the origin of every POST and WebSocket."""
    origin = header(scope, b"origin")
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(host) and host.lower() == header(scope, b"host").lower()


def secure(scope: Scope) -> bool:
    return scope.get("scheme") in ("https", "wss")


def prefix(scope: Scope) -> str:
    """The path under which a proxy shows the console, as /console; what looks like anything else is nothing."""
    given = header(scope, b"x-forwarded-prefix").rstrip("/")
    return given if re.fullmatch(r"(/[\w.~-]+)+", given) else ""


def cookie(scope: Scope, name: str) -> str | None:
    """Its value. Other programs on this host set cookies too, some of them in no proper form: each stands alone."""
    for part in header(scope, b"cookie").split(";"):
        known, _, value = part.strip().partition("=")
        if known == name:
            return value
    return None


def cookie_name(scope: Scope) -> str:
    """Cookies don't know ports: two consoles on one host need two names. `__Host-` is kept to TLS by browsers."""
    port = (scope.get("server") or ("", 0))[1]
    return f"{'__Host-' if secure(scope) else ''}firsttoken-console-{port}"


def set_cookie(scope: Scope, value: str, seconds: float = LIFE_S) -> str:
    flags = "; Secure" if secure(scope) else ""
    return f"{cookie_name(scope)}={value}; Path=/; Max-Age={int(seconds)}; HttpOnly; SameSite=Strict{flags}"


def session_of(scope: Scope) -> Session | None:
    session = scope.get(SESSION)
    return session if isinstance(session, Session) else None


# ---------------------------------------------------------------- short answers


async def _redirect(send: Send, to: str) -> None:
    headers = [
        (b"location", to.encode()),
        (b"content-length", b"0"),
        (b"cache-control", b"no-store"),
        *HEADERS,
    ]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, body: bytes) -> None:
    if scope["type"] == "websocket":
        await receive()  # the request to connect, which must be taken before it can be refused
        await send({"type": "websocket.close", "code": 1008})
        return
    headers: Iterable[tuple[bytes, bytes]] = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(body)).encode()),
        *HEADERS,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
