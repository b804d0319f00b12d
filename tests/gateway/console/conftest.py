"""The console's parts, real ones: a gateway with its console before the mock, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ..running import GatewayProgram, Program

HOSTILE = "<img src=x onerror=alert(1)>"
"""A model's name, as an upstream may send it."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)


class ConsoleProgram(GatewayProgram):
    """A gateway with its console."""

    def __init__(self, folder: Path, upstream: Program):
        one = {"name": "one", "base_url": upstream.url, "models": ["mock"]}
        two = {"name": "two", "base_url": upstream.url, "models": ["other", HOSTILE]}
        alias = '[aliases.chat]\nmodel = "mock"\n'
        super().__init__(folder, [one, two], alias, console=True, console_port=0, health_interval="1s")
        self.console = next(line for line in self.lines if line.startswith("console on")).split(" on ")[1]

    def console_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "firsttoken.gateway.console" in child.cmdline())


@pytest.fixture(scope="package")
def program(upstream: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProgram]:
    program = ConsoleProgram(tmp_path_factory.mktemp("console"), upstream)
    yield program
    output = program.stop()
    assert "Traceback" not in output, output


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    # Without its sandbox, which a container's root may not have; it sees only pages of our own.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, program: ConsoleProgram) -> Iterator[Page]:
    """A browser that nobody has used yet, signed in. A page that reports an error fails its test."""
    context = browser.new_context(locale="en-US", viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    form, origin = {"key": program.admin}, {"Origin": program.console}
    answer = context.request.post(f"{program.console}/sign-in", form=form, headers=origin, max_redirects=0)
    assert answer.status == 303
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert errors == []


def sign_in(page: Page, program: ConsoleProgram) -> None:
    page.goto(program.console)
    page.get_by_label("Admin key").fill(program.admin)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
