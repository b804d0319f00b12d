"""The pictures of docs/console.md: a gateway before two mock servers, some minutes of traffic, a headless Chromium.

    python docs/make_console_pictures.py [--seconds 420] [--chromium /usr/bin/chromium]

What the pictures show is real traffic through the real gateway; only the models behind it are make-believe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).with_name("pictures")
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
MODELS = {"qwen3-8b": ("60ms", "9ms"), "llama-70b": ("140ms", "22ms")}
"""Make-believe models: their time to first token and between tokens."""
SHOTS = (
    # name, address, window, theme, language
    ("console-overview", "/", LAPTOP, "light", "en"),
    ("console-requests", "/requests", LAPTOP, "dark", "en"),
    ("console-models", "/models", LAPTOP, "light", "zh"),
    ("console-key", "/keys", LAPTOP, "light", "en"),
    ("console-chat", "/chat", LAPTOP, "light", "en"),
    ("console-phone", "/", PHONE, "dark", "zh"),
    ("console-phone-keys", "/keys", PHONE, "light", "en"),
)


def start(*command: str) -> tuple[subprocess.Popen[str], list[str]]:
    """A program of ours, and its lines until it is ready."""
    program = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    lines = []
    for line in program.stdout:
        lines.append(line.strip())
        if "ready on" in line:
            return program, lines
    sys.exit("\n".join(lines))


def call(url: str, key: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read()) if url.endswith("s") and "admin" in url else answer.read()
    except urllib.error.HTTPError as error:
        return error.code


def traffic(url: str, keys: list[str], seconds: float) -> None:
    """Poisson arrivals, prompts that share their beginnings, and now and then a failure."""
    draw, until = random.Random(1), time.monotonic() + seconds
    threads = []
    while time.monotonic() < until:
        # Many prompts of one conversation: its beginning is cached by then.
        words = f"conversation {draw.randrange(12)} " + "and a word more " * draw.randrange(5, 80)
        mock: dict[str, Any] = {"ttft_ms": draw.lognormvariate(4.3, 0.45)}
        if draw.random() < 0.02:
            mock["status"] = 500
        body = {
            "model": draw.choices(["chat", *MODELS], [3, 2, 1])[0],
            "messages": [{"role": "user", "content": words}],
            "stream": True,
            "max_tokens": draw.randrange(10, 120),
            "mock": mock,
        }
        key = draw.choices(keys, [6, 3, 1, 2])[0]
        threads.append(threading.Thread(target=call, args=(f"{url}/v1/chat/completions", key, body)))
        threads[-1].start()
        time.sleep(draw.expovariate(4))
    for thread in threads:
        thread.join()


def take(browser: Browser, console: str, key: str) -> None:
    for name, path, window, theme, language in SHOTS:
        context = browser.new_context(viewport=window, color_scheme=theme, locale=language)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(console)
        page.fill("#key", key)
        page.click("button[type=submit]")
        page.goto(console + path)
        page.wait_for_selector("h1")
        if name == "console-key":
            page.click("text=web-app")
        elif name == "console-chat":
            _talk(page)
        elif path == "/":
            page.locator(".spans button").first.click()
        page.wait_for_timeout(1500)
        page.screenshot(path=PICTURES / f"{name}.png")
        context.close()


def _talk(page: Page) -> None:
    page.get_by_role("switch", name="Side by side").click()
    page.get_by_label("Max tokens").fill("90")
    page.fill("textarea", "Why does the first token matter?")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.answer-text:not(.waiting)').length == 2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420.0, help="of traffic before the pictures")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="path of the browser")
    given = parser.parse_args()
    programs = []
    with tempfile.TemporaryDirectory() as folder:
        config = [f'port = 0\nconsole_port = 0\nstate_dir = "{folder}/state"\n']
        for name, (ttft, itl) in MODELS.items():
            mock, lines = start(
                "firsttoken.bench.mock_server", "--model", name, "--ttft", ttft, "--itl", itl, "--slots", "24"
            )
            programs.append(mock)
            config.append(
                f'[[upstreams]]\nname = "{name.partition("-")[0]}"\nbase_url = "{lines[-1].split()[-1]}"\n'
            )
        config.append('[aliases.chat]\nmodel = "qwen3-8b"\nfallbacks = ["llama-70b"]\n')
        file = Path(folder, "gateway.toml")
        file.write_text("".join(config))
        try:
            gateway, lines = start("firsttoken", "gateway", "--config", os.fspath(file))
            programs.append(gateway)
            admin, console, url = (
                line.split()[-1] for line in lines if " on " in line or "admin key" in line
            )
            call(
                f"{url}/admin/v1/plans", admin, {"name": "agents", "priority": "agent", "quota_5h": 2_000_000}
            )
            wanted = [
                {"name": "web-app", "rpm": 600, "max_concurrency": 8},
                {"name": "coding-agent", "plan": "agents", "max_concurrency": 2},
                {"name": "notebook", "rpm": 6},
                {"name": "night-load", "tags": ["load-test"]},
            ]
            keys = [call(f"{url}/admin/v1/keys", admin, key)["secret"] for key in wanted]
            traffic(url, keys, given.seconds)
            time.sleep(1)  # the ledger is a quarter of a second behind
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
                take(browser, console, admin)
                browser.close()
        finally:
            for program in reversed(programs):
                program.terminate()
                program.wait()


if __name__ == "__main__":
    main()
