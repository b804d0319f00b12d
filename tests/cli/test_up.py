"""`firsttoken up MODEL` as its user sees it: one command, one key, and nothing left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..gateway.running import call
from ..server.models import write_model, write_weights

LIMIT_S = 120.0


class Up:
    """The command, its output as it comes, and the processes that it started."""

    def __init__(self, model: Path, state: Path):
        command = [sys.executable, "-m", "firsttoken", "up", str(model), "--port", "0", "--no-console"]
        self.process = subprocess.Popen(
            [*command, "--state-dir", str(state)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def find(self, pattern: str) -> str | None:
        found = re.search(pattern, self.output)
        return found and found[1]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(LIMIT_S)
        self.reader.join(LIMIT_S)


def until(condition: Callable[[], object], up: Up) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, up.output
        assert up.process.poll() is None, up.output
        time.sleep(0.05)


def test_one_command_serves_a_model_behind_a_key_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = write_weights(write_model(tmp_path / "tiny"))
    up = Up(model, tmp_path / "state")
    family: list[psutil.Process] = []
    try:
        until(lambda: "gateway ready" in up.output, up)
        address, key = up.find(r"gateway ready on (\S+)"), up.find(r"admin key .*: (ft-\S+)")
        assert address is not None
        assert key is not None
        family = up.family()
        assert any("serve" in process.cmdline() for process in family)
        models = call("GET", f"{address}/v1/models", key=key)[1]["data"]
        body = {
            "model": models[0]["id"],
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3,
            "ignore_eos": True,
        }
        status, answer = call("POST", f"{address}/v1/chat/completions", body, key)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 3
        assert call("POST", f"{address}/v1/chat/completions", body, "ft-wrong")[0] == 401
    finally:
        up.end()
    assert up.process.returncode == 0
    assert up.output.count(key) == 1
    assert psutil.wait_procs(family, timeout=10)[1] == [], "server, engine and gateway are gone"

    again = Up(model, tmp_path / "state")
    try:
        until(lambda: any("serve" in process.cmdline() for process in again.family()), again)
        family = again.family()
    finally:
        again.end()  # while the model still loads
    assert "admin key" not in again.output
    assert psutil.wait_procs(family, timeout=10)[1] == [], "a start that is cut short leaves no server"
