"""curl, with the very line that the server prints when it is ready."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from .conftest import NAME, Server, installed, run

pytestmark = pytest.mark.long


def printed_line(server: Server) -> list[str]:
    line = re.search(r"curl .+", server.log.read_text())
    assert line is not None
    return [installed("curl"), "--silent", "--show-error", *shlex.split(line[0])[1:]]


def test_the_line_that_the_server_prints(server: Server, tmp_path: Path) -> None:
    answer = json.loads(run(printed_line(server), tmp_path))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_stream(server: Server, tmp_path: Path) -> None:
    """As the end of `make demo` says it."""
    message = {"role": "user", "content": "Hello!"}
    body = {"model": NAME, "stream": True, "max_tokens": 12, "temperature": 0, "messages": [message]}
    address = server.url + "/v1/chat/completions"
    headers = ["-H", "Content-Type: application/json"]
    curl = [installed("curl"), "--silent", "--show-error", "-N"]
    events = run([*curl, address, *headers, "-d", json.dumps(body)], tmp_path).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    whole = json.loads(run([*curl, address, *headers, "-d", json.dumps(body | {"stream": False})], tmp_path))
    assert text == whole["choices"][0]["message"]["content"]
