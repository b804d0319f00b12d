"""The console as its user meets it: a real gateway before the mock, the real console, a real browser."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ..running import Program, call, chat
from .conftest import HOSTILE, ConsoleProgram, sign_in


def create_key(page: Page, program: ConsoleProgram, name: str) -> str:
    """By the page's own button; returns the secret that it showed."""
    page.goto(f"{program.console}/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_role("button", name="New key").click()
    shown = page.locator(".secret")
    expect(shown).to_have_text(re.compile(r"^ft-[\w-]{43}$"))
    secret = shown.inner_text()
    page.get_by_role("button", name="I have kept it").click()
    expect(shown).to_have_count(0)
    return secret


def row(page: Page, words: str) -> Locator:
    return page.locator("tbody tr").filter(has_text=words)


def wait_for_rows(program: ConsoleProgram, key: str, count: int) -> list[dict[str, Any]]:
    """The ledger is a quarter of a second behind."""
    until = time.monotonic() + 30
    while len(rows := program.rows(key=key)) < count or any(one["status"] == "running" for one in rows):
        assert time.monotonic() < until
    return rows


def wait_until_idle(upstream: Program) -> None:
    until = time.monotonic() + 30
    while call("GET", f"{upstream.url}/seen")[1]["in_flight"]:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_key_from_its_making_to_its_end(page: Page, program: ConsoleProgram) -> None:
    """Sign in, create it, call with it, see the call and its TTFT, limit it, see the 429, revoke it."""
    page.context.clear_cookies()
    sign_in(page, program)
    secret = create_key(page, program, "walk")
    assert secret not in page.content()
    page.reload()
    expect(row(page, "walk")).to_contain_text("active")
    assert secret not in page.content()

    assert program.call("POST", "/v1/chat/completions", chat(stream=True), secret)[0] == 200
    (recorded,) = wait_for_rows(program, "walk", 1)
    page.goto(f"{program.console}/requests")
    expect(row(page, "walk")).to_contain_text(f"{recorded['ttft_ms']:.0f} ms")
    row(page, "walk").get_by_role("link").click()
    expect(page.get_by_role("heading", name="Where the time went")).to_be_visible()
    expect(page.locator(".times")).to_contain_text("first decode")
    expect(page.locator(".main")).to_contain_text(recorded["id"])

    page.get_by_role("link", name="walk").click()
    expect(page.locator(".main")).to_contain_text("TTFT p95")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("dialog").get_by_label("Requests per minute").fill("1")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".facts").filter(has_text="Requests per minute")).to_contain_text("1")
    expect(page.get_by_role("dialog")).to_have_count(0)
    statuses = [program.call("POST", "/v1/chat/completions", chat(), secret)[0] for _ in range(3)]
    assert 429 in statuses
    wait_for_rows(program, "walk", 4)
    page.goto(f"{program.console}/requests?order=newest&status=limited")
    expect(row(page, "walk").first).to_contain_text("limited")

    page.goto(f"{program.console}/keys")
    row(page, "walk").get_by_role("link").click()
    page.get_by_role("button", name="New secret").click()
    page.get_by_role("dialog").get_by_role("button", name="New secret").click()
    expect(page.locator(".secret")).to_have_text(re.compile("^ft-"))
    rotated = page.locator(".secret").inner_text()
    page.get_by_role("button", name="I have kept it").click()
    assert program.call("GET", "/v1/models", key=secret)[0] == 401
    assert program.call("GET", "/v1/models", key=rotated)[0] == 200

    page.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.locator(".badge").filter(has_text="revoked")).to_be_visible()
    assert program.call("GET", "/v1/models", key=rotated)[0] == 401
    page.reload()
    assert rotated not in page.content()


def test_a_refused_key_says_why_and_keeps_what_was_written(page: Page, program: ConsoleProgram) -> None:
    page.goto(f"{program.console}/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("<script>alert(1)</script>")
    dialog.get_by_role("button", name="New key").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must be 1 to 100 letters")
    expect(dialog.get_by_label("Name")).to_have_value("<script>alert(1)</script>")


def test_a_plan_is_made_given_and_changed(page: Page, program: ConsoleProgram) -> None:
    page.goto(f"{program.console}/keys")
    page.get_by_role("button", name="New plan").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("agents")
    dialog.get_by_label("Tokens per week").fill("5000")
    dialog.get_by_role("button", name="New plan").click()
    card = page.locator(".small-card").filter(has_text="agents")
    expect(card).to_contain_text("5,000")
    card.get_by_role("button", name="Edit").click()
    page.get_by_role("dialog").get_by_label("Tokens per week").fill("7000")
    page.get_by_role("button", name="Save").click()
    expect(card).to_contain_text("7,000")
    assert program.call("GET", "/admin/v1/plans/agents")[1]["quota_week"] == 7000
    program.make_key("bot", plan="agents")
    page.reload()
    card.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("is used by bot")).to_be_visible()  # the gateway's refusal is shown


def test_the_overview_leaves_load_tests_out_until_they_are_wanted(
    page: Page, program: ConsoleProgram
) -> None:
    live, load = program.make_key("live"), program.make_key("load", tags=["load-test"])
    for key, count in ((live, 1), (load, 2)):
        for _ in range(count):
            assert program.call("POST", "/v1/chat/completions", chat(stream=True), key)[0] == 200
    wait_for_rows(program, "load", 2)
    wait_for_rows(program, "live", 1)

    def requests(load_test: int) -> str:
        answer = program.call("GET", f"/admin/v1/usage?load_test={load_test}")[1]
        return f"{answer['data'][0]['requests']} in 1 h"

    page.goto(program.console)
    tile = page.locator(".tile").filter(has_text="Requests")
    expect(tile).to_contain_text(requests(0))
    expect(page.locator(".tile").filter(has_text="TTFT p95")).to_contain_text("ms")
    expect(page.locator(".chart svg").first).to_be_visible()
    page.get_by_role("switch", name="With load tests").click()
    expect(tile).to_contain_text(requests(1))
    assert requests(0) != requests(1)


def test_an_alias_is_switched(page: Page, program: ConsoleProgram) -> None:
    page.goto(f"{program.console}/models")
    expect(page.locator(".small-card").filter(has_text=re.compile("^one"))).to_contain_text("up")
    page.locator(".alias").filter(has_text="chat").get_by_label("Model").click()
    page.get_by_role("option", name="other").click()
    expect(page.locator(".alias").filter(has_text="chat")).to_contain_text("switched")
    aliases = program.call("GET", "/admin/v1/models")[1]["aliases"]
    assert [alias["target"] for alias in aliases if alias["name"] == "chat"] == ["other"]
    page.get_by_role("button", name="Back to the file's").click()
    expect(page.locator(".alias").filter(has_text="chat")).not_to_contain_text("switched")


def test_two_models_stream_side_by_side(page: Page, program: ConsoleProgram, upstream: Program) -> None:
    page.goto(f"{program.console}/chat")
    page.get_by_label("Max tokens").fill("400")
    page.get_by_role("switch", name="Side by side").click()
    page.get_by_placeholder("Ask something").fill("Is it\n  streamed?")
    page.keyboard.press("Enter")
    answers = page.locator(".pane:visible .answer")
    expect(answers).to_have_count(2)
    # 400 tokens at 5 ms take two seconds: what is there before the end came as a stream.
    expect(answers.nth(0).locator(".answer-text.waiting")).to_have_text(re.compile(r"\w+ \w+"))
    early = answers.nth(0).locator(".answer-text").inner_text()
    expect(answers.nth(1)).to_contain_text("400 tokens")
    expect(answers.nth(0)).to_contain_text("400 tokens")
    expect(answers.nth(0).locator(".measured")).to_have_text(
        re.compile(r"TTFT [\d.]+ m?s · [\d.,]+ tok/s · 400 tokens")
    )
    whole = answers.nth(0).locator(".answer-text").inner_text()
    assert whole.startswith(early)
    assert len(early.split()) < len(whole.split()) == 400


def test_a_stopped_answer_is_cancelled_upstream(
    page: Page, program: ConsoleProgram, upstream: Program
) -> None:
    page.goto(f"{program.console}/chat")
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_placeholder("Ask something").fill("Never end")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer-text")).to_have_text(re.compile(r"\w+ \w+"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()
    wait_until_idle(upstream)


def test_a_page_that_is_left_ends_its_answers(page: Page, program: ConsoleProgram, upstream: Program) -> None:
    page.goto(f"{program.console}/chat")
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_placeholder("Ask something").fill("Never end")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-text")).to_have_text(re.compile(r"\w+ \w+"))
    page.goto(program.console)
    wait_until_idle(upstream)


@pytest.mark.parametrize("path", ["/models", "/requests", "/chat"])
def test_names_from_upstreams_are_words_not_html(page: Page, program: ConsoleProgram, path: str) -> None:
    page.goto(program.console + path)
    page.get_by_label("Model").first.click()
    expect(page.get_by_role("option", name=HOSTILE)).to_be_visible()
    expect(page.locator("img[src=x]")).to_have_count(0)


def test_language_and_theme_are_kept(page: Page, program: ConsoleProgram) -> None:
    page.goto(program.console)
    page.get_by_role("button", name="Language").click()
    page.get_by_text("中文").click()
    expect(page.get_by_role("heading", name="概览")).to_be_visible()
    page.get_by_role("button", name="主题").click()
    page.get_by_text("深色").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.goto(f"{program.console}/keys")
    expect(page.get_by_role("heading", name="密钥与套餐")).to_be_visible()
    expect(page.locator("body")).to_have_class(re.compile("body--dark"))


def test_nothing_is_wider_than_a_phone(page: Page, program: ConsoleProgram) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/", "/keys", "/models", "/requests", "/chat"):
        page.goto(program.console + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_signing_out_ends_the_session_on_the_server(page: Page, program: ConsoleProgram) -> None:
    page.goto(program.console)
    before = {cookie["name"]: cookie["value"] for cookie in page.context.cookies()}
    (name,) = [name for name in before if name.startswith("firsttoken-console")]
    (cookie,) = [cookie for cookie in page.context.cookies() if cookie["name"] == name]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert program.admin not in str(page.context.cookies())
    page.get_by_role("button", name="Account").click()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Admin key")).to_be_visible()
    page.context.add_cookies([{"name": name, "value": before[name], "url": program.console}])
    page.goto(f"{program.console}/keys")
    expect(page).to_have_url(f"{program.console}/sign-in")


def test_a_stalled_or_dead_console_moves_no_token(program: ConsoleProgram) -> None:
    console = program.console_process()
    key = program.make_key("steady")
    os.kill(console.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            status, answer = program.call("POST", "/v1/chat/completions", chat(stream=True), key)
            assert (status, answer.rstrip()[-6:]) == (200, "[DONE]")
    finally:
        os.kill(console.pid, signal.SIGKILL)
    assert program.call("POST", "/v1/chat/completions", chat(stream=True), key)[0] == 200
    until = time.monotonic() + 60
    while True:  # another is started
        try:
            assert call("GET", f"{program.console}/health")[0] == 200
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.2)
    assert program.console_process().pid != console.pid


def test_the_console_ends_with_the_gateway(upstream: Program, tmp_path: Path) -> None:
    """Also when the gateway is killed, and when the console itself hangs."""
    program = ConsoleProgram(tmp_path, upstream)
    console = program.console_process()
    program.stop(signal.SIGKILL)
    console.wait(30)
    program = ConsoleProgram(tmp_path, upstream)
    console = program.console_process()
    os.kill(console.pid, signal.SIGSTOP)
    program.stop()
    assert not console.is_running()
