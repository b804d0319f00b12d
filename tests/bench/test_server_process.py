"""A started server is ready or says why not, and is gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from firsttoken.bench.server_process import serve
from firsttoken.engine.config import ConfigError

MOCK = [sys.executable, "-m", "firsttoken.bench.mock_server"]


async def test_ready_and_gone() -> None:
    with serve(MOCK) as server:
        await server.ready(30)
        assert server.process.poll() is None
    assert server.process.poll() is not None
    assert not psutil.pid_exists(server.process.pid)


async def test_gone_after_an_error() -> None:
    async def fail() -> None:
        with serve(MOCK) as server:
            pids.append(server.process.pid)
            await server.ready(30)
            raise RuntimeError("oops")

    pids: list[int] = []
    with pytest.raises(RuntimeError, match="oops"):
        await fail()
    assert not psutil.pid_exists(pids[0])


async def test_its_children_are_gone_too(tmp_path: Path) -> None:
    """A server that dies leaving a child behind: the whole group is ended."""
    script = (
        "import subprocess, sys, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid));"
        "sys.exit('error: no room')"
    )
    with pytest.raises(ConfigError, match="error: no room"), serve([sys.executable, "-c", script]) as server:
        await server.ready(30)
    child = int((tmp_path / "pid").read_text())
    assert gone(child)


async def test_a_server_that_never_gets_ready() -> None:
    script = "print('loading', flush=True); import time; time.sleep(600)"
    with serve([sys.executable, "-c", script]) as server:
        with pytest.raises(ConfigError, match="not ready within 1 s: loading"):
            await server.ready(1)
        assert server.process.poll() is None
    assert server.process.poll() is not None


SLEEPER = """
import asyncio, sys
from firsttoken.bench.client import run
from firsttoken.bench.server_process import serve
with serve([sys.executable, "-m", "firsttoken.bench.mock_server"]) as server:
    async def work():
        await server.ready(30)
        print(server.process.pid, flush=True)
        await asyncio.sleep(600)
    run(work())
"""


def test_ctrl_c_leaves_no_process() -> None:
    bench = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert bench.stdout is not None
    pid = int(bench.stdout.readline())
    assert psutil.pid_exists(pid)
    os.kill(bench.pid, signal.SIGINT)
    assert bench.wait(20) != 0
    bench.stdout.close()
    assert gone(pid)


def gone(pid: int) -> bool:
    """True once the process has ended (an orphan may stay a zombie until init collects it)."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
