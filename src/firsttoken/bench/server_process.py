"""Starts `firsttoken serve` as a process of its own and ends it for certain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from firsttoken.bench.stamped_http import Http, Unreachable, clock
from firsttoken.engine.config import ConfigError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Served:
    """A started server. `await ready()` before use."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    async def ready(self, limit: float, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        """Returns when /health answers 200. Raises ConfigError, with the server's own last words, if it ends
        before that or takes more than `limit` seconds. waiting: called with the seconds waited so far."""
        began = clock()
        async with Http(self.url, timeout=5) as http:
            while True:
                if self.process.poll() is not None:
                    raise ConfigError(
                        f"the server did not start (exit {self.process.returncode}): {_last_line(self.log)}"
                    )
                with suppress(Unreachable):
                    if (await http.request("GET", "/health")).status == 200:
                        return
                if clock() - began > limit:
                    raise ConfigError(f"the server was not ready within {limit:g} s: {_last_line(self.log)}")
                waiting(clock() - began)
                await asyncio.sleep(0.1)


@contextmanager
def serve(command: Sequence[str]) -> Iterator[Served]:
    """Starts `command --host 127.0.0.1 --port FREE`; on the way out its whole process group is gone."""
    port = free_port()
    with tempfile.NamedTemporaryFile("w+", prefix="firsttoken-serve-", suffix=".log") as log:
        # A session of its own: Ctrl-C reaches the benchmark alone, which then ends the server in good order.
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Served(f"http://127.0.0.1:{port}", process, Path(log.name))
        finally:
            end(process)


def firsttoken_serve(model: str, flags: Sequence[str] = ()) -> list[str]:
    """The command that serves `model` so that a benchmark can switch its settings."""
    return [sys.executable, "-m", "firsttoken", "serve", model, "--dev-mode", *flags]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it printed nothing"])[-1]


def end(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """SIGTERM, after `grace` seconds SIGKILL to the whole process group, and waits. Idempotent."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # impatient: no grace then
            pass
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
