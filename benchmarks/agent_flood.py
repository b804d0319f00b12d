"""What a flood of agent traffic does to the first token of interactive keys, through gateway and engine.

    python benchmarks/agent_flood.py [MODEL] [--agents N] [--repeats N] [--same-class] [--json FILE] [-- serve flags]

Starts `firsttoken serve MODEL` and a gateway before it (`priority = true`), with a key of an interactive plan and one
of an agent plan. Rounds alternate: interactive chats alone, then the same chats while N agents keep asking, each for a
long answer to a long prompt that nobody has cached. Interactive chats come one by one, at random moments, with a
prompt of their own behind a shared system prompt. The figure is the interactive p95 TTFT under the flood as a multiple
of what it was alone; at most 1.2 is the target. `--same-class` gives the agents the interactive class, to show what
the classes do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from firsttoken.bench.client import Call, Client, Record, run
from firsttoken.bench.metrics import percentile
from firsttoken.bench.server_process import end, firsttoken_serve, serve
from firsttoken.bench.stamped_http import Http

START_LIMIT_S = 300.0
CHATS = 20
"""Interactive requests per round."""
PAUSE_S = (0.1, 0.7)
"""Between the end of a chat and the next, drawn evenly."""
SYSTEM_WORDS, CHAT_WORDS, CHAT_TOKENS = 150, 60, 16
AGENT_WORDS, AGENT_TOKENS = 600, 128
SETTLE_S = 3.0
"""From the flood's start to the first chat."""
TARGET = 1.2
TEXT = """time water people word sound work place year live back thing name sentence man line boy farm end men land
home hand picture air animal house page letter mother answer study learn plant food sun city tree story"""


class Prompts:
    """Text that is new in every request, but for the chats' system prompt."""

    def __init__(self) -> None:
        self.draw = random.Random(7)
        self.numbers = itertools.count()
        self.vocabulary = TEXT.split()
        self.system = self.words(SYSTEM_WORDS)

    def words(self, count: int) -> str:
        return " ".join(self.draw.choice(self.vocabulary) for _ in range(count))

    def chat(self) -> Call:
        user = f"{next(self.numbers)} {self.words(CHAT_WORDS)}"
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": user}]
        return Call(messages=messages, max_tokens=CHAT_TOKENS, extra={"ignore_eos": True})

    def agent(self) -> Call:
        messages = [{"role": "user", "content": f"{next(self.numbers)} {self.words(AGENT_WORDS)}"}]
        return Call(messages=messages, max_tokens=AGENT_TOKENS, extra={"ignore_eos": True})


async def chats(client: Client, prompts: Prompts) -> list[Record]:
    records = []
    for _ in range(CHATS):
        await asyncio.sleep(prompts.draw.uniform(*PAUSE_S))
        records.append(_checked(await client.stream(prompts.chat())))
    return records


async def flood(client: Client, prompts: Prompts, done: list[Record]) -> None:
    """One agent: asks again as soon as it has its answer, until it is cancelled."""
    while True:
        done.append(_checked(await client.stream(prompts.agent())))


def _checked(record: Record) -> Record:
    if not record.ok:
        raise SystemExit(f"a request failed: {record.error}")
    return record


async def measure(url: str, model: str, keys: dict[str, str], agents: int, repeats: int) -> dict[str, Any]:
    alone: list[Record] = []
    flooded: list[Record] = []
    done: list[Record] = []
    prompts = Prompts()
    async with Http(url) as http, Http(url) as other:
        interactive, agent = Client(http, model, keys["interactive"]), Client(other, model, keys["agent"])
        await chats(interactive, prompts)  # warm: sockets, permits, the system prompt's blocks
        for _ in range(repeats):
            alone += await chats(interactive, prompts)
            print(f"alone   {_ttft(alone)}", flush=True)
            tasks = [asyncio.create_task(flood(agent, prompts, done)) for _ in range(agents)]
            await asyncio.sleep(SETTLE_S)
            flooded += await chats(interactive, prompts)
            print(f"flooded {_ttft(flooded)}", flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(SETTLE_S)
    report = {name: _ttft(records) for name, records in (("alone", alone), ("flooded", flooded))}
    ratio = {share: report["flooded"][share] / report["alone"][share] for share in ("p50", "p95")}
    return {**report, "ratio": ratio, "agent_answers": len(done), "agents": agents}


def _ttft(records: list[Record]) -> dict[str, float]:
    values = [record.chunks[0][0] * 1e3 for record in records]
    return {f"p{share}": percentile(values, share) or 0.0 for share in (50, 95)} | {"requests": len(values)}


def start_gateway(folder: Path, upstream: str) -> tuple[subprocess.Popen[str], str, str]:
    """(process, address, admin key)."""
    config = folder / "gateway.toml"
    config.write_text(
        f'port = 0\nconsole = false\nstate_dir = "{folder}"\n'
        f'[[upstreams]]\nname = "engine"\nbase_url = "{upstream}"\npriority = true\n'
    )
    command = [sys.executable, "-m", "firsttoken", "gateway", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    admin = ""
    for line in process.stdout:
        if line.startswith("admin key"):
            admin = line.split(": ")[1].strip()
        if line.startswith("gateway ready"):
            return process, line.split(" on ")[1].strip(), admin
    raise SystemExit("the gateway did not start")


def ask(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def make_keys(url: str, admin: str, same_class: bool) -> dict[str, str]:
    keys = {}
    for name in ("interactive", "agent"):
        priority = "interactive" if same_class else name
        ask(f"{url}/admin/v1/plans", admin, {"name": name, "priority": priority})
        keys[name] = ask(f"{url}/admin/v1/keys", admin, {"name": name, "plan": name})["secret"]
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--same-class", action="store_true", help="agents get the interactive class")
    parser.add_argument("--json", type=Path)
    arguments, flags = parser.parse_known_args()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # by way of `finally`: nothing is left
    command = firsttoken_serve(arguments.model, [flag for flag in flags if flag != "--"])
    with tempfile.TemporaryDirectory() as folder, serve(command) as server:
        asyncio.run(server.ready(START_LIMIT_S))
        gateway, url, admin = start_gateway(Path(folder), server.url)
        try:
            keys = make_keys(url, admin, arguments.same_class)
            model = ask(f"{url}/v1/models", admin)["data"][0]["id"]
            report = run(measure(url, model, keys, arguments.agents, arguments.repeats))
        finally:
            end(gateway)
    for name in ("alone", "flooded"):
        figures = report[name]
        print(
            f"{name:8} TTFT p50 {figures['p50']:7.1f}  p95 {figures['p95']:7.1f} ms, {figures['requests']} chats"
        )
    print(f"ratio    p50 {report['ratio']['p50']:.2f}  p95 {report['ratio']['p95']:.2f} (target {TARGET})")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    raise SystemExit(not arguments.same_class and report["ratio"]["p95"] > TARGET)


if __name__ == "__main__":
    main()
