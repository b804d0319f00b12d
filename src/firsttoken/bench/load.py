"""Two ways to load a server: closed loop (users who wait for their answers) and open loop (a schedule)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from firsttoken.bench import metrics
from firsttoken.bench.client import Call, Client, ClientHealth, Record, Reply, watch_client
from firsttoken.bench.stamped_http import clock


@dataclass(slots=True, kw_only=True)
class Trial:
    """What one run of calls gave: the subject of the trial metrics."""

    records: list[Record]
    wall: float
    """Seconds from the first request's sending to the last answer's end."""
    health: ClientHealth
    counters: dict[str, float] = field(default_factory=dict)
    """Growth of the server's counters over the trial; see `controls.Counters`."""

    def ttft_p50_seconds(self) -> float | None:
        value = metrics.over_requests("ttft", self.records, 50)
        return None if value is None else value / 1e3

    def max_overlap(self) -> int:
        """Most requests that were between their first and last token at one time, as the client saw it."""
        edges = []
        for record in self.records:
            if len(record.chunks) > 1:
                edges += [
                    (record.sent + record.chunks[0][0], 1),
                    (record.sent + record.chunks[-1][0], -1),
                ]
        running = most = 0
        for _, step in sorted(edges):  # at equal times an end (−1) sorts before a start
            running += step
            most = max(most, running)
        return most


async def closed_loop(client: Client, calls: Sequence[Call], concurrency: int) -> Trial:
    """`concurrency` users take the calls in order; each sends its next when its last answer is complete."""
    replies: list[Reply] = []
    queue = iter(calls)

    async def user() -> None:
        for call in queue:
            replies.append(await client.send(call))

    return await _measure(client, [user() for _ in range(concurrency)], replies)


async def open_loop(client: Client, calls: Sequence[Call], times: Sequence[float]) -> Trial:
    """Sends calls[i] at `times[i]` seconds after the start, whether or not earlier ones are answered."""
    replies: list[Reply] = []
    start = clock() + 0.05

    async def one(call: Call, at: float) -> None:
        await asyncio.sleep(max(0.0, start + at - clock()))
        replies.append(await client.send(call, intended=start + at))

    return await _measure(client, [one(c, t) for c, t in zip(calls, times, strict=True)], replies)


async def _measure(client: Client, users: Sequence[Coroutine[Any, Any, None]], replies: list[Reply]) -> Trial:
    client.origin = clock()
    async with watch_client() as health, asyncio.TaskGroup() as group:
        for user in users:
            group.create_task(user)
    records = sorted((reply.read() for reply in replies), key=lambda record: record.intended)
    first = min((r.sent for r in records), default=0.0)
    last = max((r.sent + (r.ended or 0.0) for r in records), default=0.0)
    late = [r.sent - r.connect - r.intended for r in records if r.status is not None]
    health.dispatch_p99 = metrics.percentile(late, 99)
    return Trial(records=records, wall=last - first, health=health)


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """`count` arrival times, in seconds, of a Poisson process of `rate` arrivals per second."""
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times
