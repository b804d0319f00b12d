"""A thousand requests to the real engine, a third of which leave at random: nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.parse
import urllib.request
from pathlib import Path

from .models import write_model, write_weights
from .test_serve import served, until

VISITS = 1000


async def visit(host: str, port: int, draw: random.Random) -> str:
    leaves = draw.random() < 1 / 3
    body = {
        "messages": [{"role": "user", "content": "Hi " * draw.randrange(1, 40)}],
        "max_tokens": draw.randrange(1, 60),
        "ignore_eos": True,
        "seed": draw.getrandbits(20),
        "n": draw.choice([1, 1, 2]),
        "stream": draw.random() < 0.7,
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        writer.write((head + "connection: close\r\n\r\n").encode() + data)
        if leaves:
            try:
                await asyncio.wait_for(reader.read(), draw.random() * 0.2)
            except TimeoutError:
                writer.transport.abort()
                return "left"
            return "done"
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200"), reply
        assert b'"finish_reason":"length"' in reply, reply
        return "done"
    finally:
        writer.close()


def gauge(address: str, name: str) -> float:
    text = urllib.request.urlopen(address + "/metrics", timeout=30).read().decode()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no {name} in /metrics"
    return sum(map(float, values))


def test_no_block_stays_in_use(tmp_path: Path) -> None:
    model = write_weights(write_model(tmp_path / "m"))
    with served(model, "--max-num-seqs", "16", "--kv-cache-memory", "256KiB", "--max-model-len", "256") as (
        address,
        process,
        _,
    ):
        url = urllib.parse.urlsplit(address)
        assert url.hostname is not None
        assert url.port is not None
        draw = random.Random(7)

        async def all_visits() -> list[str]:
            limit = asyncio.Semaphore(48)

            async def one(seed: int) -> str:
                async with limit:
                    return await visit(url.hostname or "", url.port or 0, random.Random(seed))

            return await asyncio.gather(*(one(draw.getrandbits(32)) for _ in range(VISITS)))

        outcomes = asyncio.run(all_visits())
        assert outcomes.count("left") > VISITS / 10
        until(lambda: gauge(address, "vllm:num_requests_running") == 0, "no request runs")
        until(lambda: gauge(address, "vllm:num_requests_waiting") == 0, "no request waits")
        assert gauge(address, "vllm:kv_cache_usage_perc") == 0
        assert gauge(address, "vllm:request_success_total") > VISITS / 2
        assert process.poll() is None
