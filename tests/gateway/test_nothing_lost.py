"""20,000 requests with disconnects, upstream deaths and a killed gateway process: the ledger is what the mock saw."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .conftest import new_postgres_database
from .running import GatewayProgram, Program, call, chat, mock

REQUESTS = 20_000
AT_ONCE = 64
CONCURRENCY, RPM = 12, 3000
LEDGER_LIMIT_S = 60.0


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_the_ledger_equals_what_the_upstreams_saw(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings: dict[str, Any] = {"workers": 2}
    if kind == "postgresql":
        settings["database"] = new_postgres_database(request.getfixturevalue("postgres_server"))
    # Two upstreams, so that the second's own count of requests in flight is that of the limited key.
    free, limited = [mock("--model", name, "--ttft", "2ms", "--itl", "1ms") for name in ("free", "limited")]
    upstreams = [
        {"name": name, "base_url": m.url, "models": [name]}
        for name, m in (("free", free), ("limited", limited))
    ]
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams, **settings)
    try:
        whole = await Load(gateway).run()
        rows = await settled_rows(gateway)
        usage = gateway.call("GET", "/admin/v1/usage?load_test=1")[1]["data"][0]
        seen = seen_by(free) + seen_by(limited)
        peak = call("GET", f"{limited.url}/seen")[1]["max_in_flight"]
    finally:
        output = await asyncio.to_thread(gateway.stop)
        free.stop()
        limited.stop()
    assert "Traceback" not in output, output[-3000:]
    check_accounts(rows, seen, whole, usage)
    assert CONCURRENCY // 2 < peak <= CONCURRENCY
    check_rpm([row for row in rows if row["model"] == "limited" and row["status"] != "limited"])


class Load:
    """REQUESTS requests, AT_ONCE at once: some leave in mid-stream, some upstreams die, one worker is killed."""

    def __init__(self, gateway: GatewayProgram):
        self.gateway = gateway
        self.keys = {
            "free": gateway.make_key("free"),
            "limited": gateway.make_key("limited", max_concurrency=CONCURRENCY, rpm=RPM),
        }
        self.whole: set[str] = set()
        """Ids of requests whose answer the client has had to its end."""
        self.numbers = iter(range(REQUESTS))
        self.draw = random.Random(4)

    async def run(self) -> set[str]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as self.http:
            await asyncio.gather(*(self.work() for _ in range(AT_ONCE)))
        return self.whole

    async def work(self) -> None:
        for number in self.numbers:
            if number == REQUESTS // 2:
                os.kill((await asyncio.to_thread(self.gateway.workers))[0], signal.SIGKILL)
            try:
                await self.one()
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(0.02)  # its worker was killed

    async def one(self) -> None:
        model = "limited" if self.draw.random() < 0.4 else "free"
        fate = self.draw.choice(["leave", "die", *["stay"] * 10, *["body"] * 4])
        body = chat(self.draw.randint(1, 6), prompt="word " * self.draw.randint(1, 9)) | {"model": model}
        body["stream"] = fate != "body"
        if fate == "die":
            body["mock"] = {"die_after": 1}
            body["max_tokens"] = 6
        headers = {"Authorization": f"Bearer {self.keys[model]}"}
        async with self.http.post(
            f"{self.gateway.url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            id = answer.headers["X-Gateway-Request-Id"]
            if fate == "leave" and model == "free":
                await answer.content.readany()
                answer.close()
                return
            received = await answer.read()
            if answer.status == 200 and b'"error"' not in received:
                self.whole.add(id)


def seen_by(upstream: Program) -> list[dict[str, Any]]:
    detail = call("GET", f"{upstream.url}/seen?detail=1")[1]["detail"]
    assert isinstance(detail, list)
    return detail


async def settled_rows(gateway: GatewayProgram) -> list[dict[str, Any]]:
    """All rows, once none is running any more: the dead worker's journal has been taken in."""
    for _ in range(int(LEDGER_LIMIT_S)):
        await asyncio.sleep(1)
        if not gateway.call("GET", "/admin/v1/requests?status=running&load_test=1")[1]["data"]:
            break
    rows: list[dict[str, Any]] = []
    while True:
        path = f"/admin/v1/requests?load_test=1&limit=1000&offset={len(rows)}"
        page = gateway.call("GET", path)[1]["data"]
        rows += page
        if len(page) < 1000:
            return rows


def check_accounts(
    rows: list[dict[str, Any]], seen: list[dict[str, Any]], whole: set[str], usage: dict[str, Any]
) -> None:
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows)
    statuses = Counter(row["status"] for row in rows)
    assert statuses["running"] == 0
    assert min(statuses[status] for status in ("ok", "error", "aborted", "limited")) > 0, statuses
    counts = Counter(one["id"] for one in seen)
    assert set(counts) <= set(by_id), "the upstream saw a request that the ledger doesn't hold"
    assert max(counts.values()) == 1, "a request was sent twice"
    unseen = {row["id"] for row in rows if row["status"] != "limited"} - set(counts)
    # Only what the killed worker had journalled and not yet sent, or its successor could not take.
    assert len(unseen) <= AT_ONCE
    assert {by_id[id]["status"] for id in unseen} <= {"aborted", "error"}
    for one in seen:
        row = by_id[one["id"]]
        if row["status"] == "ok":
            assert row["prompt_tokens"] == one["prompt_tokens"]
            assert row["completion_tokens"] == one["completion_tokens"]
    # One exception: a worker may die after its last byte and before the client reads it; its end was journalled.
    assert {by_id[id]["status"] for id in whole} == {"ok"}
    for status, count in statuses.items():
        assert usage[status] == count
    for column in ("prompt_tokens", "completion_tokens"):
        assert usage[column] == sum(row[column] or 0 for row in rows)


def check_rpm(admitted: list[dict[str, Any]]) -> None:
    """No 59 s hold more than RPM (a row's time is up to 0.35 s before its admission, so not quite 60)."""
    times = sorted(row["started_at"] for row in admitted)
    assert len(times) > RPM // 4
    for i, start in enumerate(times):
        if i + RPM < len(times):
            assert times[i + RPM] - start > 59.0
