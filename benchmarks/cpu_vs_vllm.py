"""firsttoken beside vLLM on one CPU machine: the same client, weights and limits, in one run and in turn.

Both servers get bf16, max_num_seqs 8, max_model_len 2048, max_num_batched_tokens 2048 and the same number of
KV tokens; only one of them is running at a time. A repeat is four trials, one server start each:

    firsttoken · vLLM · firsttoken without prefix cache · vLLM without prefix cache

`stream_bench.py` of the peers folder measures both: 16 chats with a shared system prompt (about 658 tokens,
salted per batch) and 64 output tokens, greedy, at concurrency 1 and 4. Figures of a repeat:

    cold TTFT c1     median over the chats of the trial without prefix cache: every prompt token is computed
    first TTFT c1    the first chat of the batch with prefix cache: nothing of its system prompt is cached yet
    warm TTFT c1     median over the chats with prefix cache: all but the first find the system prompt
    TPOT c1          mean over the chats of (last − first token) / (tokens − 1), with prefix cache
    tok/s c4         output tokens / wall time of the batch at concurrency 4, with prefix cache
    start            launch of the command → /health answers 200
    PSS under load   largest sum of PSS over all processes of the server, during a batch of its own that
                     counts for nothing else (reading PSS takes time from the server)
    PSS idle         the same sum after the load

A ratio is firsttoken / vLLM within one repeat; the table gives the median of the ratios and their range.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from firsttoken.bench import machine
from firsttoken.bench.server_process import end, free_port
from firsttoken.models import resolve

MAX_SEQS, MAX_LEN, MAX_BATCHED = 8, 2048, 2048
KV_TOKENS = MAX_SEQS * MAX_LEN
VLLM_BLOCK = 128
"""Tokens per KV block of vLLM on a CPU."""
NAME = "smol"
"""Served model name: the peers' scripts give it to vLLM."""
START_LIMIT_S, BENCH_LIMIT_S = 300, 600
OURS, THEIRS = "firsttoken", "vLLM"
console = Console(width=None if sys.stdout.isatty() else 130)


class Trouble(RuntimeError):
    """Something that makes the comparison impossible; the message is for the user."""


# -- what is shown --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A figure of the table, and the targets that firsttoken is held to."""

    key: str
    label: str
    digits: int
    max_ratio: float | None = None
    min_ratio: float | None = None
    max_value: float | None = None

    def target(self) -> str:
        parts = []
        if self.max_value is not None:
            parts.append(f"<= {self.max_value:g}")
        if self.max_ratio is not None:
            parts.append(f"ratio <= {self.max_ratio:g}")
        if self.min_ratio is not None:
            parts.append(f"ratio >= {self.min_ratio:g}")
        return ", ".join(parts)

    def met(self, ours: float, ratio: float) -> bool | None:
        """Whether the medians meet the targets; None without any."""
        if not self.target():
            return None
        return (
            (self.max_value is None or ours <= self.max_value)
            and (self.max_ratio is None or ratio <= self.max_ratio)
            and (self.min_ratio is None or ratio >= self.min_ratio)
        )


ROWS = (
    Row("cold_ttft_ms", "cold TTFT c1, ms", 0, max_ratio=0.7),
    Row("first_ttft_ms", "first TTFT c1, ms", 0),
    Row("warm_ttft_ms", "warm TTFT p50 c1, ms", 1, max_ratio=0.7),
    Row("tpot_ms", "TPOT c1, ms", 2, max_ratio=1.0),
    Row("tok_s_c1", "tok/s c1", 1),
    Row("tok_s_c4", "tok/s c4", 1, min_ratio=1.1),
    Row("start_s", "start → ready, s", 1, max_value=10.0),
    Row("pss_load_mib", "PSS under load, MiB", 0, max_value=1536, max_ratio=0.5),
    Row("pss_idle_mib", "PSS idle after, MiB", 0),
)


# -- processes ------------------------------------------------------------------------------------------------


def processes_of(pid: int) -> list[psutil.Process]:
    """The process, its descendants, and whoever else is in its session (a child whose parent has ended)."""
    found = {}
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        found = {process.pid: process for process in [root, *root.children(recursive=True)]}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == pid:
                found[process.pid] = process
    return list(found.values())


def pss_mib(pid: int) -> float:
    """Sum of the proportional set sizes: shared pages are split among those who share them."""
    total = 0
    for process in processes_of(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


class PssPeak:
    """The largest sum seen while the context is open."""

    def __init__(self, pid: int, every_s: float = 0.5) -> None:
        self.mib = 0.0
        self._pid, self._every_s, self._stop = pid, every_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PssPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.mib = max(self.mib, pss_mib(self._pid))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@dataclass
class Server:
    url: str
    pid: int
    start_s: float
    kv_tokens: int


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, began: float) -> float:
    """Seconds from `began` to ready. Raises Trouble with the end of the log."""
    while not answers(url):
        if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Trouble(f"{shlex.join(map(str, process.args))} is not ready; its log ends with:\n{tail}")  # type: ignore[arg-type]
        time.sleep(0.05)
    return time.monotonic() - began


@contextmanager
def firsttoken(model: Path, folder: Path, *, prefix_cache: bool, flags: Sequence[str]) -> Iterator[Server]:
    """A running `firsttoken serve`; gone afterwards."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "firsttoken", "serve", str(model), "--host", "127.0.0.1"),
        *("--port", str(port), "--served-model-name", NAME, "--dtype", "bfloat16"),
        *("--max-num-seqs", str(MAX_SEQS), "--max-model-len", str(MAX_LEN)),
        *(
            "--max-num-batched-tokens",
            str(MAX_BATCHED),
        ),  # the KV pool is MAX_SEQS * MAX_LEN tokens by default
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
        *flags,
    ]
    log = folder / f"firsttoken-{port}.log"
    began = time.monotonic()
    with log.open("wb") as output:
        # A session of its own: Ctrl-C reaches this program alone, which then ends the server in good order.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        start_s = wait_ready(url, process, log, began)
        yield Server(url, process.pid, start_s, our_kv_tokens(url))
    finally:
        end(process)


def our_kv_tokens(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("firsttoken:kv_blocks_total"):
                return int(float(line.rsplit(" ", 1)[1])) * 16
    raise Trouble("firsttoken's /metrics has no firsttoken:kv_blocks_total")


@contextmanager
def vllm(model: Path, peers: Path, *, prefix_cache: bool, flags: Sequence[str]) -> Iterator[Server]:
    """A running vLLM, started and stopped by the peers' scripts; gone afterwards."""
    port = free_port()
    name = f"beside-{os.getpid()}-{port}"
    logs = Path(os.environ.get("PEER_HOME", Path.home() / ".cache/peers/vllm-cpu")) / "logs"
    command = [
        *("bash", str(peers / "serve.sh"), name, str(port), str(model)),
        *("--num-gpu-blocks-override", str(KV_TOKENS // VLLM_BLOCK)),
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
        *flags,
    ]
    began = time.monotonic()
    script = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            if script.poll() not in (None, 0) or time.monotonic() - began > START_LIMIT_S:
                assert script.stdout is not None
                script.kill()
                raise Trouble(f"vLLM is not ready:\n{script.stdout.read().decode(errors='replace')[-3000:]}")
            time.sleep(0.05)
        start_s = time.monotonic() - began
        script.wait(30)
        pid = int((logs / f"{name}.pid").read_text())
        yield Server(url, pid, start_s, their_kv_tokens(logs / f"{name}.log"))
    finally:
        if script.poll() is None:
            script.kill()
        script.communicate()
        if (logs / f"{name}.pid").exists():
            subprocess.run(["bash", str(peers / "stop.sh"), name], stdout=subprocess.DEVNULL, check=False)


def their_kv_tokens(log: Path) -> int:
    """vLLM prints `… KV cache size: 16,384 tokens`."""
    for line in log.read_text(errors="replace").splitlines():
        if "KV cache size:" in line:
            return int(line.split("KV cache size:")[1].split()[0].replace(",", ""))
    raise Trouble(f"no KV cache size in {log}")


# -- trials ---------------------------------------------------------------------------------------------------


def stream_bench(
    peers: Path, server: Server, folder: Path, *, concurrency: Sequence[int], n: int, out: int
) -> dict[int, dict[str, Any]]:
    """Summaries of the peers' client by concurrency. Raises Trouble if a request failed."""
    command = [
        *(sys.executable, str(peers / "stream_bench.py"), "trial", server.url, "--model", NAME),
        *("--conc", *map(str, concurrency), "--n", str(n), "--out", str(out)),
        *("--pid", str(server.pid), "--out-dir", str(folder)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_LIMIT_S, check=False)
    results = folder / "trial.json"
    if run.returncode or not results.exists():
        raise Trouble(f"stream_bench.py failed:\n{run.stdout[-1500:]}{run.stderr[-1500:]}")
    summaries = [entry["summary"] for entry in json.loads(results.read_text())]
    results.unlink()
    if {summary["conc"] for summary in summaries} != set(concurrency):
        raise Trouble(f"a request failed:\n{run.stdout[-3000:]}")
    return {summary["conc"]: summary for summary in summaries}


def with_cache(peers: Path, server: Server, folder: Path, n: int, out: int) -> dict[str, float]:
    summaries = stream_bench(peers, server, folder, concurrency=[1, 4], n=n, out=out)
    with PssPeak(server.pid) as peak:
        stream_bench(peers, server, folder, concurrency=[4], n=max(4, n // 2), out=out)
    time.sleep(1.0)
    idle = pss_mib(server.pid)
    c1, c4 = summaries[1], summaries[4]
    return {
        "first_ttft_ms": c1["ttft_ms"]["first"],
        "warm_ttft_ms": c1["ttft_ms"]["p50"],
        "tpot_ms": c1["tpot_ms"],
        "tok_s_c1": c1["tok_s"],
        "tok_s_c4": c4["tok_s"],
        "start_s": server.start_s,
        "pss_load_mib": max(peak.mib, idle),
        "pss_idle_mib": idle,
        "cpu_s": c1["cpu_s"] + c4["cpu_s"],
        "kv_tokens": server.kv_tokens,
    }


def without_cache(peers: Path, server: Server, folder: Path, n: int, out: int) -> dict[str, float]:
    summary = stream_bench(peers, server, folder, concurrency=[1], n=n, out=out)[1]
    return {"cold_ttft_ms": summary["ttft_ms"]["p50"], "cold_start_s": server.start_s}


def compare(args: argparse.Namespace, model: Path, folder: Path, report: dict[str, Any]) -> None:
    """Fills report["repeats"] trial by trial and writes it after each: an ended run shows what it has."""
    starts: dict[str, Callable[[bool], Any]] = {
        OURS: lambda cache: firsttoken(model, folder, prefix_cache=cache, flags=args.firsttoken_flags),
        THEIRS: lambda cache: vllm(model, args.peers, prefix_cache=cache, flags=args.vllm_flags),
    }
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=4 * args.repeats)
        for repeat in range(args.repeats):
            figures: dict[str, dict[str, float]] = {OURS: {}, THEIRS: {}}
            report["repeats"].append(figures)
            for cache, measure in ((True, with_cache), (False, without_cache)):
                for side in (OURS, THEIRS):
                    kind = "" if cache else ", no prefix cache"
                    progress.update(task, description=f"repeat {repeat + 1}: {side}{kind}")
                    busy = psutil.cpu_percent(1.0)
                    if busy > 15:
                        progress.console.print(f"[yellow]other programs use {busy:.0f} % of the processor[/]")
                    report["busy_percent_before"].append(busy)
                    with starts[side](cache) as server:
                        if server.kv_tokens != KV_TOKENS:
                            raise Trouble(f"{side} has {server.kv_tokens} KV tokens, not {KV_TOKENS}")
                        figures[side] |= measure(args.peers, server, folder, args.n, args.out)
                    progress.advance(task)
                    write(args.json, report)


# -- report ---------------------------------------------------------------------------------------------------


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))


def summarise(repeats: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Per row: each side's values, the ratios per repeat, their medians, and whether the targets are met."""
    summary = {}
    for row in ROWS:
        pairs = [
            (repeat[OURS][row.key], repeat[THEIRS][row.key])
            for repeat in repeats
            if row.key in repeat[OURS] and row.key in repeat[THEIRS]
        ]
        if not pairs:
            continue
        ratios = [ours / theirs for ours, theirs in pairs]
        ours = median(ours for ours, _ in pairs)
        summary[row.key] = {
            "firsttoken": [ours for ours, _ in pairs],
            "vllm": [theirs for _, theirs in pairs],
            "ratios": ratios,
            "ratio": median(ratios),
            "target": row.target(),
            "met": row.met(ours, median(ratios)),
        }
    return summary


def table(summary: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title="firsttoken beside vLLM: median (range) over the repeats")
    for heading in ("", "firsttoken", "vLLM", "ratio per repeat", "ratio", "target", ""):
        shown.add_column(heading, justify="left" if heading in ("", "target") else "right")
    for row in ROWS:
        if row.key not in summary:
            continue
        entry = summary[row.key]

        def spread(values: list[float], digits: int = row.digits) -> str:
            low, high = min(values), max(values)
            if len(values) == 1:
                return f"{low:.{digits}f}"
            return f"{median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"

        shown.add_row(
            row.label,
            spread(entry["firsttoken"]),
            spread(entry["vllm"]),
            " ".join(f"{ratio:.2f}" for ratio in entry["ratios"]),
            f"{entry['ratio']:.2f}",
            entry["target"],
            {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[entry["met"]],
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peers", type=Path, required=True, help="folder of serve.sh, stop.sh, stream_bench.py"
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder or name, as for firsttoken serve")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--n", type=int, default=16, help="chats per batch")
    parser.add_argument("--out", type=int, default=64, help="output tokens per chat")
    parser.add_argument("--json", type=Path, default=Path("out/cpu_vs_vllm.json"))
    parser.add_argument("--firsttoken-flags", type=shlex.split, default=[], help="more flags, as one word")
    parser.add_argument(
        "--vllm-flags", type=shlex.split, default=[], help="such as --vllm-flags=--enforce-eager"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not sys.platform.startswith("linux"):
        console.print("error: PSS is read from /proc: this comparison needs Linux")
        return 2
    model = resolve(args.model).absolute()
    args.peers = args.peers.absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does
    report: dict[str, Any] = {
        "command": shlex.join(["benchmarks/cpu_vs_vllm.py", *sys.argv[1:]]),
        "date": machine.now(),
        "machine": machine.describe(),
        "kv_tokens": KV_TOKENS,
        "busy_percent_before": [],
        "repeats": [],
    }
    code = 0
    with tempfile.TemporaryDirectory(prefix="cpu-vs-vllm-") as folder:
        try:
            compare(args, model, Path(folder), report)
        except Trouble as trouble:
            console.print(f"error: {trouble}", markup=False)
            code = 1
        except KeyboardInterrupt:
            console.print("ended early: what is below is of an incomplete run")
            code = 130
    report["summary"] = summarise(report["repeats"])
    report["complete"] = code == 0
    write(args.json, report)
    if report["summary"]:
        console.print(table(report["summary"]))
    console.print(f"written: {args.json}")
    return code


if __name__ == "__main__":
    sys.exit(main())
