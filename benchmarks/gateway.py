"""What the gateway adds to the first token and to the gaps between chunks, against the upstream directly.

    python benchmarks/gateway.py [--quick] [--json FILE] [--peer litellm] [--peer NAME=URL,KEY,MODEL]

Starts the mock upstream (programmed token times) and a gateway (one process, SQLite) with a key that has every
limit, then sends the same streams directly and through the gateway in turn: at 1 stream one after the other, at 64
and 256 streams with Poisson arrivals. Then short requests that are not streams, as fast as they go. The client
stamps at the socket and measures the lag of its own event loop; all run on the same cores. `--peer litellm`
installs and starts LiteLLM's proxy after ours, before the same upstream; NAME=URL,KEY,MODEL adds a gateway that runs
already, before `python -m firsttoken.bench.mock_server --ttft 20ms --itl 50ms`. `--quick` is for a look only.

Added TTFT is the percentile through the gateway minus the same percentile directly; the added gap likewise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from gateway_peers import KEY, start_litellm

from firsttoken.bench.client import run

TTFT_MS, ITL_MS = 20, 50
TOKENS = {1: 8, 64: 40, 256: 40}
"""Streams at once → tokens per answer."""
SINGLE_REQUESTS = 300
SECONDS = 6.0
"""Of arrivals, for each target and number of streams at once."""
SHORT_SECONDS, SHORT_CONNECTIONS = 4.0, 64
TARGETS = {1: (0.6, 2.0), 64: (3.0, 15.0), 256: (10.0, 60.0)}
"""Streams at once → most added TTFT in ms at p50 and p99."""
TARGET_SHORT = 2500
TOKEN = re.compile(rb'"content": ?"[^"]')


@dataclass
class Target:
    name: str
    url: str
    key: str
    model: str = "mock"

    def request(self, **body: Any) -> bytes:
        parsed = urlparse(self.url)
        messages = [{"role": "user", "content": "tell me something about the first token " * 20}]
        payload = json.dumps({"model": self.model, "messages": messages, **body}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parsed.netloc}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


@dataclass
class Sample:
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    bunched: int = 0
    """Reads that brought more than one token."""
    errors: int = 0


class Connection(asyncio.Protocol):
    """One keep-alive connection; a request at a time."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[bool]:
        self.buffer = bytearray()
        self.length: int | None = None
        self.stamps: list[float] = []
        self.bunched = 0
        self.done = asyncio.get_running_loop().create_future()
        self.sent = time.perf_counter()
        self.transport.write(request)  # type: ignore[attr-defined]
        return self.done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.buffer += data
        tokens = len(TOKEN.findall(data))
        self.stamps += [now] * tokens
        self.bunched += tokens > 1
        if self.length is None and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.buffer[:end]).lower()
            found = re.search(rb"content-length: (\d+)", head)
            self.length = end + 4 + int(found[1]) if found else 0
        if self.length == 0:
            if self.buffer.endswith(b"0\r\n\r\n"):
                self._finish()
        elif self.length is not None and len(self.buffer) >= self.length:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(False)

    def _finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(self.buffer.startswith(b"HTTP/1.1 200"))


class Client:
    def __init__(self) -> None:
        self.idle: dict[str, list[Connection]] = {}

    async def connection(self, target: Target) -> Connection:
        free = self.idle.setdefault(target.url, [])
        while free:
            connection = free.pop()
            if not connection.transport.is_closing():
                return connection
        parsed = urlparse(target.url)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, parsed.hostname, parsed.port)
        return connection

    async def stream(self, target: Target, request: bytes, sample: Sample) -> None:
        connection = await self.connection(target)
        if not await connection.send(request):
            sample.errors += 1
            return
        stamps = connection.stamps
        sample.ttft.append((stamps[0] - connection.sent) * 1e3)
        sample.gaps += [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]
        sample.bunched += connection.bunched
        self.idle[target.url].append(connection)


async def single(client: Client, targets: list[Target]) -> dict[str, Sample]:
    """One stream at a time, the targets in turn."""
    samples = {target.name: Sample() for target in targets}
    requests = {
        t.name: t.request(stream=True, max_tokens=TOKENS[1], mock={"ttft_ms": 5, "itl_ms": 2})
        for t in targets
    }
    draw = random.Random(1)
    for warm in (True, False):
        for _ in range(10 if warm else SINGLE_REQUESTS):
            for target in targets:
                # The mock's timers go by whole milliseconds: start anywhere within one, or the phase is a bias.
                wait = time.perf_counter() + draw.uniform(0, 0.002)
                while time.perf_counter() < wait:
                    pass
                sample = Sample() if warm else samples[target.name]
                await client.stream(target, requests[target.name], sample)
    return samples


async def poisson(client: Client, target: Target, at_once: int) -> Sample:
    """Arrivals at the rate that keeps about `at_once` streams running; the ramp up is not counted."""
    tokens = TOKENS[at_once]
    duration = (TTFT_MS + tokens * ITL_MS) / 1e3
    rate = at_once / duration
    request = target.request(stream=True, max_tokens=tokens)
    draw = random.Random(at_once)
    sample, ramp = Sample(), Sample()
    tasks = set()
    loop = asyncio.get_running_loop()
    began = due = loop.time()
    while due < began + duration + SECONDS:
        due += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due - loop.time()))
        into = sample if due > began + duration else ramp
        task = asyncio.create_task(client.stream(target, request, into))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return sample


async def short(client: Client, target: Target) -> float:
    """Requests per second that are answered at once, over SHORT_CONNECTIONS connections."""
    request = target.request(max_tokens=1, mock={"ttft_ms": 0, "itl_ms": 0})
    count = 0
    until = time.perf_counter() + SHORT_SECONDS

    async def work() -> None:
        nonlocal count
        connection = await client.connection(target)
        while time.perf_counter() < until:
            if not await connection.send(request):
                raise SystemExit(f"{target.name}: {bytes(connection.buffer[:300])!r}")
            count += 1

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(SHORT_CONNECTIONS)))
    return count / (time.perf_counter() - started)


class Lag:
    """How late the client's own timers fire, in ms."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    async def measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.02
            await asyncio.sleep(0.02)
            self.samples.append((loop.time() - due) * 1e3)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(direct: Target, other: Target) -> dict[str, Any]:
    """One gateway against the upstream directly; nothing else runs meanwhile."""
    client, report = Client(), {"streams": [], "short": {}}
    for at_once in TARGETS:
        lag = Lag()
        measuring = asyncio.create_task(lag.measure())
        if at_once == 1:
            samples = await single(client, [direct, other])
        else:
            samples = {target.name: await poisson(client, target, at_once) for target in (direct, other)}
        measuring.cancel()
        row = compare(other.name, at_once, samples[direct.name], samples[other.name])
        report["streams"].append(row | {"client_lag_p99_ms": percentile(lag.samples, 0.99)})
        show(report["streams"][-1])
    for target in (direct, other):
        report["short"][target.name] = await short(client, target)
        print(f"{target.name:12} {report['short'][target.name]:8.0f} short requests/s", flush=True)
    return report


def ratios(report: dict[str, Any], peer: str) -> dict[str, float]:
    """What the peer adds as a multiple of what our gateway adds, and its short requests per second as a share."""
    rows = {(row["target"], row["streams"]): row for row in report["streams"]}
    found = {
        f"added TTFT {share} at {at_once}": rows[peer, at_once][f"added_ttft_{share}_ms"]
        / rows["gateway", at_once][f"added_ttft_{share}_ms"]
        for at_once in TARGETS
        for share in ("p50", "p99")
    }
    return found | {"short requests/s": report["short"][peer] / report["short"]["gateway"]}


def compare(name: str, at_once: int, direct: Sample, through: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "target": name,
        "streams": at_once,
        "requests": len(through.ttft),
        "errors": through.errors,
    }
    for what in ("ttft", "gaps"):
        a, b = getattr(direct, what), getattr(through, what)
        for share in (0.5, 0.99):
            row[f"added_{what}_p{share * 100:.0f}_ms"] = percentile(b, share) - percentile(a, share)
    row["bunched_reads"] = through.bunched
    row["tokens"] = len(through.gaps) + len(through.ttft)
    return row


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['target']:12} {row['streams']:4} streams  added TTFT p50 {row['added_ttft_p50_ms']:6.2f}  p99"
        f" {row['added_ttft_p99_ms']:6.2f}   added gap p50 {row['added_gaps_p50_ms']:6.2f}  p99"
        f" {row['added_gaps_p99_ms']:6.2f} ms   {row['requests']} requests, {row['errors']} errors,"
        f" {row['bunched_reads']} of {row['tokens']} tokens bunched, client lag p99 {row['client_lag_p99_ms']:.2f} ms",
        flush=True,
    )


def verdict(report: dict[str, Any]) -> list[str]:
    """What misses its target, for our gateway."""
    missed = []
    for row in report["streams"]:
        if row["target"] == "gateway":
            for share, most in zip(("p50", "p99"), TARGETS[row["streams"]], strict=True):
                added = row[f"added_ttft_{share}_ms"]
                if added > most:
                    missed.append(f"{row['streams']} streams: added TTFT {share} {added:.2f} ms > {most}")
            if row["errors"]:
                missed.append(f"{row['streams']} streams: {row['errors']} errors")
            if row["bunched_reads"] > 0.01 * row["tokens"]:
                missed.append(f"{row['streams']} streams: {row['bunched_reads']} reads with several tokens")
    if report["short"]["gateway"] < TARGET_SHORT:
        missed.append(f"{report['short']['gateway']:.0f} short requests/s < {TARGET_SHORT}")
    return missed


# ---------------------------------------------------------------- the programs


def start(command: list[str], marker: str) -> tuple[subprocess.Popen[str], str, list[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.strip())
        if marker in line:
            return process, line.split(" on ")[1].strip(), lines
    raise SystemExit(f"{command[:4]} did not start")


def start_mock() -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "firsttoken.bench.mock_server", "--slots", "100000"]
    process, url, _ = start([*command, "--ttft", f"{TTFT_MS}ms", "--itl", f"{ITL_MS}ms"], "ready")
    return process, url


def start_gateway(folder: Path, upstream: str) -> tuple[subprocess.Popen[str], Target]:
    config = folder / "gateway.toml"
    config.write_text(
        f'port = 0\nconsole = false\nstate_dir = "{folder}"\n'
        f'[[upstreams]]\nname = "mock"\nbase_url = "{upstream}"\nmodels = ["mock"]\npriority = true\n'
    )
    process, url, lines = start(
        [sys.executable, "-m", "firsttoken", "gateway", "--config", str(config)], "ready"
    )
    admin = next(line.split(": ")[1] for line in lines if line.startswith("admin key"))

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {admin}"}
        request = urllib.request.Request(f"{url}/admin/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    post("plans", {"name": "all", "quota_5h": 10**12, "quota_week": 10**12, "quota_month": 10**12})
    key = post(
        "keys", {"name": "bench", "plan": "all", "rpm": 10**9, "tpm": 10**12, "max_concurrency": 10**6}
    )
    return process, Target("gateway", url, key["secret"])


def start_peer(peer: str, folder: Path, upstream: str, processes: list[subprocess.Popen[Any]]) -> Target:
    """Started only when ours has been measured: an idle Python process is not idle enough on two cores."""
    if peer == "litellm":
        process, url = start_litellm(folder, upstream)
        processes.append(process)
        return Target("litellm", url, KEY)
    name, _, rest = peer.partition("=")
    return Target(name, *rest.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peer", action="append", default=[], help="litellm, or NAME=URL,KEY,MODEL")
    parser.add_argument("--quick", action="store_true", help="a third of the time, for a look")
    arguments = parser.parse_args()
    if arguments.quick:
        global SINGLE_REQUESTS, SECONDS, SHORT_SECONDS
        SINGLE_REQUESTS, SECONDS, SHORT_SECONDS = 100, 2.0, 1.5
    processes: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            mock, upstream = start_mock()
            processes.append(mock)
            process, gateway = start_gateway(Path(folder), upstream)
            processes.append(process)
            direct = Target("direct", upstream, "none")
            report = run(measure(direct, gateway))
            report["ratios"] = {}
            for peer in arguments.peer:
                target = start_peer(peer, Path(folder), upstream, processes)
                theirs = run(measure(direct, target))
                report["streams"] += theirs["streams"]
                report["short"][target.name] = theirs["short"][target.name]
                report["ratios"][target.name] = compared = ratios(report, target.name)
                print(f"{target.name} / gateway: " + ", ".join(f"{k} {v:.3g}" for k, v in compared.items()))
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    missed = verdict(report)
    print("every target is met" if not missed else "missed: " + "; ".join(missed))
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
