"""What speculation brings over HTTP: our own server with `auto` against `off`, in turn, on one warm engine.

    python benchmarks/speculation.py [--model smollm2-135m] [--repeats 5] [--draft PATH]

For chat, code and creative prompts, at concurrency 1 and 4: tok/s and TTFT of both, and their ratio in each pair.
Greedy answers of exactly --max-tokens tokens; within a pair both get the same requests, in alternating order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import uuid
from pathlib import Path
from typing import Any

from rich.progress import Progress

from firsttoken.bench import machine
from firsttoken.bench.client import Call, Client, run
from firsttoken.bench.controls import Controls
from firsttoken.bench.load import closed_loop
from firsttoken.bench.prompts import load
from firsttoken.bench.server_process import firsttoken_serve, serve
from firsttoken.bench.stamped_http import Http

KINDS = ("chat", "code", "creative")


async def pair_up(arguments: argparse.Namespace, flags: list[str]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    prompts = load().measured
    texts = {kind: [p.turn for p in prompts if p.category == kind] for kind in KINDS}
    with serve(firsttoken_serve(arguments.model, flags)) as served, Progress() as progress:
        await served.ready(300)
        async with Http(served.url) as http:
            client = Client(http, (await _only_model(http)))
            controls = Controls(client)
            task = progress.add_task("pairs", total=len(texts) * 2 * arguments.repeats)
            for repeat in range(arguments.repeats):
                for kind, turns in texts.items():
                    for concurrency in (1, 4):
                        order = ("off", "auto") if (repeat + concurrency) % 2 else ("auto", "off")
                        for mode in order:
                            await controls.reconfigure({"speculation": mode})
                            await controls.reset_prefix_cache()
                            trial = await closed_loop(
                                client, _calls(turns, arguments.max_tokens), concurrency
                            )
                            failed = [r.error for r in trial.records if r.error]
                            if failed:
                                raise SystemExit(f"error: a request failed: {failed[0]}")
                            results.append(
                                {
                                    "kind": kind,
                                    "concurrency": concurrency,
                                    "repeat": repeat,
                                    "mode": mode,
                                    "tok_s": len(trial.records) * arguments.max_tokens / trial.wall,
                                    "ttft_ms": 1e3 * (trial.ttft_p50_seconds() or 0),
                                    "speculation": await controls.speculation(),
                                }
                            )
                        progress.advance(task)
    return results


async def _only_model(http: Http) -> str:
    return str((await Client(http, "").get_json("/v1/models"))["data"][0]["id"])


def _calls(turns: list[str], max_tokens: int) -> list[Call]:
    salt = uuid.uuid4().hex
    extra = {"temperature": 0, "ignore_eos": True, "cache_salt": salt}
    return [
        Call(messages=[{"role": "user", "content": turn}], max_tokens=max_tokens, extra=extra)
        for turn in turns
    ]


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| prompts | concurrency | tok/s off | tok/s auto | ratio (each pair) | TTFT off | TTFT auto, ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, concurrency in dict.fromkeys((r["kind"], r["concurrency"]) for r in results):
        rows = [r for r in results if (r["kind"], r["concurrency"]) == (kind, concurrency)]
        off = [r for r in rows if r["mode"] == "off"]
        auto = {r["repeat"]: r for r in rows if r["mode"] == "auto"}
        faster = [auto[r["repeat"]]["tok_s"] / r["tok_s"] for r in off]
        later = [auto[r["repeat"]]["ttft_ms"] / r["ttft_ms"] for r in off]

        def middle(values: list[float]) -> float:
            return statistics.median(values)

        lines.append(
            f"| {kind} | {concurrency} | {middle([r['tok_s'] for r in off]):.1f} |"
            f" {middle([r['tok_s'] for r in auto.values()]):.1f} | {middle(faster):.2f}"
            f" ({', '.join(f'{x:.2f}' for x in sorted(faster))}) | {middle([r['ttft_ms'] for r in off]):.1f} |"
            f" {middle([r['ttft_ms'] for r in auto.values()]):.1f} | {middle(later):.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flags = ["--max-model-len", "2048", "--max-num-seqs", "8"]
    if arguments.draft:
        flags += ["--draft", arguments.draft]
    results = run(pair_up(arguments, flags))
    here = machine.describe()
    print(f"{here['processor']}, {here['cores']} cores, {machine.now()}")
    print("\n".join(table(results)))
    for r in results:
        if r["mode"] == "auto" and r["repeat"] == arguments.repeats - 1:
            print(f"{r['kind']}, {r['concurrency']}: {r['speculation'].get('reason')}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
