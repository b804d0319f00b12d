"""How long the usage pages take over a million requests: filled through the ledger itself, then asked.

    python benchmarks/gateway_usage.py [--requests N] [--database URL]

30 days, 50 keys, 3 models, 2 upstreams. SQLite in a temporary folder unless an (empty) database is named.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator

from rich.progress import track

from firsttoken.gateway import ledger, reports
from firsttoken.gateway.journal import Record
from firsttoken.gateway.store import Store

DAY_S = 86_400.0
BATCH = 5000


def records(count: int, until: float) -> Iterator[list[Record]]:
    draw = random.Random(0)
    for start in range(0, count, BATCH):
        yield [
            Record(
                id=f"req-{i:032x}",
                process_id="p",
                key_id=f"key_{draw.randrange(50)}",
                endpoint="chat",
                alias="chat",
                model=f"model-{draw.randrange(3)}",
                upstream=f"upstream-{draw.randrange(2)}",
                status="ok",
                stream=True,
                started_at=until - 30 * DAY_S * (1 - i / count),
                ttft_ms=draw.lognormvariate(5, 0.8),
                duration_ms=2000.0,
                prompt_tokens=700,
                cached_tokens=600,
                completion_tokens=100,
            )
            for i in range(start, min(count, start + BATCH))
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--database")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(arguments.database or f"sqlite:///{folder}/gateway.db")
        store.migrate()
        now = time.time()
        started = time.perf_counter()
        batches = records(arguments.requests, now)
        for batch in track(batches, "filling", total=-(-arguments.requests // BATCH)):
            ledger.ingest(store, batch)
        rate = arguments.requests / (time.perf_counter() - started)
        print(f"filled {arguments.requests:,} requests, {rate:,.0f}/s")
        month = reports.Selection(since=now - 30 * DAY_S, until=now + 1)
        day = reports.Selection(since=now - DAY_S, until=now + 1)
        key = reports.Selection(since=now - 30 * DAY_S, until=now + 1, key_id="key_1")
        with store.read() as connection:
            for name, ask in {
                "30 days by key": lambda: reports.usage(connection, month, ("key",)),
                "30 days over time": lambda: reports.usage(connection, month, ("time",)),
                "last day, per 5 minutes": lambda: reports.usage(connection, day, ("time",), 300),
                "last day by key and model": lambda: reports.usage(connection, day, ("key", "model")),
                "TTFT distribution, 30 days": lambda: reports.distribution(connection, month),
                "slowest requests of 30 days": lambda: reports.requests(connection, month, order="slowest"),
                "a key's newest requests": lambda: reports.requests(connection, key),
            }.items():
                started = time.perf_counter()
                rows = ask()
                print(f"{name:30} {(time.perf_counter() - started) * 1e3:7.1f} ms, {len(rows)} rows")
        store.close()


if __name__ == "__main__":
    main()
