"""probe and bench as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SLOW = ("--itl", "20ms")
"""Answers long enough that two of them overlap even where the machine is busy."""


def firsttoken(*words: str, home: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    env = keep | environment | ({"FIRSTTOKEN_HOME": str(home)} if home else {}) | {"COLUMNS": "140"}
    return subprocess.run(
        [sys.executable, "-m", "firsttoken", *words], capture_output=True, text=True, env=env, timeout=120
    )


def test_probe(mock: Callable[..., str]) -> None:
    url = mock("--api-key", "sk-very-secret")
    done = firsttoken("probe", f"{url}/v1", "--max-tokens", "7", OPENAI_API_KEY="sk-very-secret")
    assert done.returncode == 0, done.stderr
    for words in (
        "mock at http",
        "TTFT",
        "TPOT",
        "7 tokens",
        "tok/s",
        "of which cached: 0 tokens",
        "queue",
        "prefill",
    ):
        assert words in done.stdout
    assert "sk-very-secret" not in done.stdout + done.stderr


def test_probe_json(mock: Callable[..., str]) -> None:
    done = firsttoken("probe", mock(), "--json", "--repeat", "2", "--max-tokens", "4", "--prompt", "one two")
    data = json.loads(done.stdout)
    assert [request["completion_tokens"] for request in data["requests"]] == [4, 4]
    first = data["requests"][0]
    parts = {name: value for name, value in first["parts"].items() if name != "first_decode"}
    assert sum(parts.values()) == pytest.approx(first["ttft"])
    assert len(first["raw"]["chunks"]) == 4
    assert data["definitions"]["ttft"].startswith("first chunk with a non-empty token")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "nothing listens at 127.0.0.1:9"),
        ("ftp://host", "is no http:// or https:// address"),
        ("{mock}", "wants a valid key: give --api-key or OPENAI_API_KEY"),
        ("{mock}/wrong/path", "does not look like an OpenAI-compatible server"),
    ],
)
def test_probe_errors_are_one_line(mock: Callable[..., str], url: str, message: str) -> None:
    address = url.format(mock=mock("--api-key", "k")) if "{mock}" in url else url
    done = firsttoken("probe", address)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_probe_of_a_failing_stream(mock: Callable[..., str]) -> None:
    done = firsttoken("probe", mock("--error-after", "2"))
    assert done.returncode == 1
    assert "error event inside a 200 answer" in done.stdout


def test_bench_stages_writes_its_files(mock: Callable[..., str], tmp_path: Path) -> None:
    words = ("--concurrency", "2", "--prompts", "2", "--max-tokens", "4", "--url", mock(*SLOW))
    files = ("--json", str(tmp_path / "out" / "s.json"), "--html", str(tmp_path / "out" / "s.html"))
    done = firsttoken("bench", "stages", "mock", *words, *files, home=tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 users at once" in done.stdout
    data = json.loads((tmp_path / "out" / "s.json").read_text())
    assert len(data["trials"]) == 15
    assert data["command"].startswith("firsttoken bench stages mock")
    assert (tmp_path / "out" / "s.html").read_text().startswith("<!doctype html>")
    assert list((tmp_path / "home" / "bench").iterdir()) == []  # the journal is gone when all is done


def test_bench_stages_fails_when_a_premise_does(mock: Callable[..., str], tmp_path: Path) -> None:
    words = ("--concurrency", "2", "--prompts", "2", "--max-tokens", "4", "--url", mock(*SLOW, "--deaf"))
    done = firsttoken("bench", "stages", "mock", *words, home=tmp_path)
    assert done.returncode == 1
    assert "0 is INVALID: the cache should be off" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--concurrency", "1,x"), "--concurrency takes numbers"),
        (("--concurrency", "0"), "--concurrency must be at least 1"),
        (("--json", "/proc/nowhere/x.json"), "cannot write"),
        (("--url", "http://127.0.0.1:9"), "nothing listens"),
        (("--url", "http://127.0.0.1:9", "--", "--dtype", "float32"), "flags after --"),
    ],
)
def test_bench_stages_errors_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = firsttoken("bench", "stages", "mock", *words, home=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")


def test_bench_stages_says_why_its_server_does_not_start(tmp_path: Path) -> None:
    model = str(tmp_path / "no-such-model")
    done = firsttoken("bench", "stages", model, "--raw-draft", "off", home=tmp_path)
    assert done.returncode == 2
    assert "the server did not start" in done.stderr
    assert "no-such-model" in done.stderr
