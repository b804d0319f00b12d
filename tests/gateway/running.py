"""Real programs for the tests: the gateway, the mock upstream, and a PostgreSQL server, on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

START_LIMIT_S = 60.0


class Program:
    """A process whose first lines of output are read until `marker` appears."""

    def __init__(self, command: list[str], marker: str, env: dict[str, str] | None = None):
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if marker in line:
                self.url = line.split(" on ")[1].strip()
                # Read on: a program that fills the pipe would wait in a write for ever.
                self.reader = threading.Thread(target=self._read, args=[self.process.stdout], daemon=True)
                self.reader.start()
                return
        raise AssertionError("\n".join(self.lines))

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.append(line.rstrip())

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Ends it and returns what it wrote."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(timeout=60)
        self.reader.join(timeout=60)
        return "\n".join(self.lines) + "\n"


def mock(*arguments: str) -> Program:
    return Program(
        [sys.executable, "-m", "firsttoken.bench.mock_server", "--slots", "100000", *arguments],
        "mock server ready",
    )


class GatewayProgram(Program):
    """`firsttoken gateway` with a configuration; `admin` is its first admin key, if this start made one."""

    def __init__(self, folder: Path, upstreams: list[dict[str, Any]], extra: str = "", **settings: Any):
        self.folder = folder
        self.config = folder / "gateway.toml"
        values = {"port": 0, "console": False, "state_dir": str(folder / "state")} | settings
        self.write(upstreams, extra, values)
        super().__init__(
            [sys.executable, "-m", "firsttoken", "gateway", "--config", str(self.config)], "gateway ready"
        )
        secrets = [line.split(": ")[1] for line in self.lines if line.startswith("admin key")]
        self.admin = secrets[0] if secrets else ""

    def write(self, upstreams: list[dict[str, Any]], extra: str, values: dict[str, Any]) -> None:
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        for upstream in upstreams:
            lines += ["[[upstreams]]", *(f"{name} = {json.dumps(value)}" for name, value in upstream.items())]
        self.config.write_text("\n".join(lines) + "\n" + extra)

    def workers(self) -> list[int]:
        """Pids of the worker processes."""
        import psutil

        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        return call(method, self.url + path, body, self.admin if key is None else key)

    def make_key(self, name: str, **values: Any) -> str:
        status, answer = self.call("POST", "/admin/v1/keys", {"name": name, **values})
        assert status == 201, answer
        return str(answer["secret"])

    def rows(self, **query: Any) -> list[dict[str, Any]]:
        """Request rows, newest first, once everything is in the store."""
        time.sleep(0.6)  # two intervals of the ledger
        text = "&".join(f"{name}={value}" for name, value in {"limit": 1000, "load_test": 1, **query}.items())
        data = self.call("GET", f"/admin/v1/requests?{text}")[1]["data"]
        assert isinstance(data, list)
        return data


def call(method: str, url: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    """(status, decoded JSON or text)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, raw = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def chat(tokens: int = 3, prompt: str = "hello there", **more: Any) -> dict[str, Any]:
    return {"model": "mock", "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}], **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- PostgreSQL


def postgres_tools() -> Path | None:
    """The folder of initdb and postgres."""
    for folder in [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]:
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


@contextlib.contextmanager
def postgres(tools: Path) -> Iterator[str]:
    """A server of its own in a temporary folder, on loopback; it refuses to run as root, so root lends it a user."""
    folder = Path(tempfile.mkdtemp(prefix="firsttoken-pg-"))
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        entry = next(pwd.getpwnam(name) for name in ("postgres", "nobody") if _user_exists(name))
        shutil.chown(folder, entry.pw_uid, entry.pw_gid)
        user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    data, port = folder / "data", free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, **user}
    init = [
        tools / "initdb",
        "-D",
        data,
        "-U",
        "test",
        "-A",
        "trust",
        "-E",
        "UTF8",
        "--no-sync",
        "--locale=C",
    ]
    subprocess.run(init, check=True, **quiet)
    server = subprocess.Popen(
        [
            tools / "postgres",
            "-D",
            data,
            "-p",
            str(port),
            "-h",
            "127.0.0.1",
            "-k",
            folder,
            "-F",
            "-c",
            "max_connections=200",
        ],
        **quiet,
    )
    try:
        _wait_for_postgres(server, port)
        yield f"postgresql://test@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _wait_for_postgres(server: subprocess.Popen[bytes], port: int) -> None:
    import psycopg

    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            psycopg.connect(f"postgresql://test@127.0.0.1:{port}/postgres", connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            assert server.poll() is None, "postgres ended"
            assert time.monotonic() < until, "postgres does not answer"
            time.sleep(0.1)
