"""What a stranger, a foreign page and a client's key can't do at the console. Plain HTTP, no browser."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from urllib.parse import urlencode, urlparse

import pytest

from ..running import chat
from .conftest import ConsoleProgram

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def cookie(self) -> str:
        """NAME=VALUE of the cookie that it sets."""
        return (self.headers["Set-Cookie"] or "").partition(";")[0]


def ask(
    program: ConsoleProgram, method: str, path: str, form: dict[str, str] | None = None, **headers: str
) -> Answer:
    """Header names with _ for -. `Origin` is the console's own unless it is given; "" leaves it out."""
    url = urlparse(program.console)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    sent = {"Origin": program.console} | {name.replace("_", "-"): value for name, value in headers.items()}
    body = None if form is None else urlencode(form)
    connection.request(method, path, body, {name: value for name, value in sent.items() if value})
    answer = connection.getresponse()
    # An upgraded connection goes on; there is no body to read.
    text = "" if answer.status == 101 else answer.read().decode()
    connection.close()
    return Answer(answer.status, answer.headers, text)


def sign_in(program: ConsoleProgram, key: str | None = None, **headers: str) -> Answer:
    return ask(program, "POST", "/sign-in", {"key": program.admin if key is None else key}, **headers)


@pytest.mark.parametrize(
    "path", ["/", "/keys", "/keys/key_1", "/models", "/requests", "/requests/1", "/chat", "/x"]
)
@pytest.mark.parametrize("cookie", ["", "firsttoken-console-{port}=guess", "firsttoken-console-{port}="])
def test_a_stranger_is_led_to_the_sign_in(program: ConsoleProgram, path: str, cookie: str) -> None:
    answer = ask(program, "GET", path, Cookie=cookie.format(port=urlparse(program.console).port))
    assert (answer.status, answer.headers["Location"], answer.text) == (303, "/sign-in", "")


def test_a_stranger_gets_no_socket_and_nothing_of_nicegui(program: ConsoleProgram) -> None:
    assert ask(program, "GET", SOCKET, **UPGRADE).status == 403
    assert ask(program, "GET", "/_nicegui_ws/socket.io/?EIO=4&transport=polling").status == 401
    assert ask(program, "POST", "/_nicegui_ws/socket.io/?EIO=4&transport=polling").status == 401
    for path in ("/docs", "/openapi.json", "/static/../app.py", "/static/%2e%2e/app.py"):
        assert ask(program, "GET", path).status in (303, 404), path


def test_the_session_is_a_cookie_that_only_the_server_reads(program: ConsoleProgram) -> None:
    answer = sign_in(program)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    flags = set(answer.headers["Set-Cookie"].split("; ")[1:])
    assert flags == {"Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"}
    assert len(answer.cookie.partition("=")[2]) >= 43
    assert program.admin not in str(answer.headers)
    assert ask(program, "GET", "/keys", Cookie=answer.cookie).status == 200
    among_others = f'theirs={{"a": [1, "b"]}}; x; =; {answer.cookie}; firsttoken-console=y'
    assert ask(program, "GET", "/keys", Cookie=among_others).status == 200
    assert sign_in(program).cookie != answer.cookie


def test_behind_tls_the_cookie_never_goes_without(program: ConsoleProgram) -> None:
    origin = program.console.replace("http://", "https://")
    answer = sign_in(program, Origin=origin, X_Forwarded_Proto="https")
    assert answer.cookie.startswith("__Host-firsttoken-console-")
    assert "; Secure" in answer.headers["Set-Cookie"]
    # and one that was made with TLS is not taken without
    assert ask(program, "GET", "/", Cookie=answer.cookie).status == 303
    assert ask(program, "GET", "/", Cookie=answer.cookie, X_Forwarded_Proto="https").status == 200


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://127.0.0.1:1", "http://[::1"])
def test_a_foreign_page_changes_nothing(program: ConsoleProgram, origin: str) -> None:
    cookie = sign_in(program).cookie
    answer = sign_in(program, Origin=origin)
    assert (answer.status, answer.headers["Set-Cookie"]) == (403, None)
    assert ask(program, "POST", "/sign-out", {"token": "x"}, Origin=origin, Cookie=cookie).status == 403
    assert ask(program, "GET", SOCKET, Origin=origin, Cookie=cookie, **UPGRADE).status == 403
    polling = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert ask(program, "POST", polling, Origin=origin, Cookie=cookie).status == 403
    assert ask(program, "GET", "/", Cookie=cookie).status == 200  # and the session is still there
    assert ask(program, "GET", SOCKET, Cookie=cookie, **UPGRADE).status == 101  # as it is for our own page


def test_signing_out_takes_the_token_of_the_page(program: ConsoleProgram) -> None:
    cookie = sign_in(program).cookie
    for form in ({}, {"token": ""}, {"token": "x" * 43}):
        assert ask(program, "POST", "/sign-out", form, Cookie=cookie).status == 403
    page = ask(program, "GET", "/", Cookie=cookie).text
    token = re.search(r'"name":\s*"token"[^}]*"value":\s*"([\w-]{43})"', page)
    assert token, "the page has the form"
    answer = ask(program, "POST", "/sign-out", {"token": token[1]}, Cookie=cookie)
    assert (answer.status, answer.headers["Location"]) == (303, "/sign-in")
    assert ask(program, "GET", "/", Cookie=cookie).status == 303


def test_only_an_admin_key_signs_in(program: ConsoleProgram) -> None:
    client = program.make_key("no-admin")
    for number, key in enumerate(
        ["", "wrong", "ft-" + "a" * 43, client, "a\r\nX-Admin: 1", "ключ", "k" * 100_000]
    ):
        answer = sign_in(program, key, X_Forwarded_For=f"10.1.0.{number}")
        assert (answer.status, answer.headers["Set-Cookie"]) == (403, None), key[:50]
        assert key[:20] not in answer.text or key in ("", "wrong")


def test_guessing_is_slowed_by_address(program: ConsoleProgram) -> None:
    statuses = [sign_in(program, f"guess-{i}", X_Forwarded_For="10.2.0.1").status for i in range(10)]
    assert statuses == [403] * 8 + [429] * 2
    answer = sign_in(program, X_Forwarded_For="10.2.0.1")
    assert answer.status == 429  # the right key too: whether it is right is not told
    assert 0 < int(answer.headers["Retry-After"]) <= 300
    assert sign_in(program, X_Forwarded_For="10.2.0.2").status == 303


def test_a_session_ends_with_its_key(program: ConsoleProgram) -> None:
    second = program.make_key("second admin", role="admin")
    cookie = sign_in(program, second).cookie
    assert ask(program, "GET", "/models", Cookie=cookie).status == 200
    assert program.call("POST", "/admin/v1/keys/second%20admin/revoke")[0] == 200
    assert ask(program, "GET", "/models", Cookie=cookie).headers["Location"] == "/sign-in"
    assert ask(program, "GET", "/static/console.css", Cookie=cookie).status == 200
    assert ask(program, "GET", "/chat", Cookie=cookie).status == 303  # for good, not for that page


def test_no_page_contains_a_key(program: ConsoleProgram) -> None:
    secret = program.make_key("kept-secret")
    cookie = sign_in(program).cookie
    program.call("POST", "/v1/chat/completions", chat(), secret)
    id = program.rows(key="kept-secret")[0]["id"]
    key_id = program.call("GET", "/admin/v1/keys/kept-secret")[1]["id"]
    for path in ("/", "/keys", f"/keys/{key_id}", "/models", "/requests", f"/requests/{id}", "/chat"):
        answer = ask(program, "GET", path, Cookie=cookie)
        assert answer.status == 200
        assert secret not in answer.text, path
        assert program.admin not in answer.text, path
        assert answer.headers["Cache-Control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "kept-secret" in ask(program, "GET", f"/keys/{key_id}", Cookie=cookie).text


def test_behind_a_path_of_a_proxy_links_stay_there(program: ConsoleProgram) -> None:
    cookie = sign_in(program).cookie
    assert ask(program, "GET", "/", X_Forwarded_Prefix="/console").headers["Location"] == "/console/sign-in"
    page = ask(program, "GET", "/", Cookie=cookie, X_Forwarded_Prefix="/console").text
    assert "/console/keys" in page
    assert "/console/static/console.css" in page
    for hostile in ('"><script>alert(1)</script>', "//evil.example", "javascript:alert(1)"):
        answer = ask(program, "GET", "/", X_Forwarded_Prefix=hostile)
        assert answer.headers["Location"] == "/sign-in", hostile
