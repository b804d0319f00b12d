"""A mock server as a process of its own, for every test that speaks HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def mock() -> Iterator[Callable[..., str]]:
    """mock("--ttft", "5ms", …) starts a mock server and returns its address."""
    processes: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> str:
        quick = ("--ttft", "2ms", "--itl", "1ms")
        process = subprocess.Popen(
            [sys.executable, "-m", "firsttoken.bench.mock_server", "--port", "0", *quick, *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("mock server ready on "), ready
        return ready.split()[-1]

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
