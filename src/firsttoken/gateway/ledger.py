"""Journal records become rows and rollups, each exactly once; dead processes' requests become `aborted`.

A batch is one transaction: rows, minute and day rollups, TTFT histograms and quota use move together. It is
idempotent by request id: a row that has ended is never counted again, so journals may be replayed at will.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from firsttoken.gateway import journal, pools
from firsttoken.gateway import tables as t
from firsttoken.gateway.accounts import load_prices
from firsttoken.gateway.histogram import bin_of
from firsttoken.gateway.journal import Record
from firsttoken.gateway.store import LOCK_LEDGER, Store

DAY_S = 86_400
REAPED = "the gateway process ended before the request did"
"""The error text of requests whose process died; a late end record of theirs still replaces it."""

Spent = dict[tuple[str, str, float], int]
"""(key id, quota kind, window) → tokens that a batch added to the quota's use."""

_COLUMNS = [column.name for column in t.requests.columns]


def ingest(store: Store, records: Iterable[Record]) -> Spent:
    """Stores a batch; returns what it added to quotas."""
    newest: dict[str, Record] = {}
    for record in records:
        known = newest.get(record.id)
        if known is None or known.status == "running":
            newest[record.id] = record
    if not newest:
        return {}
    with store.write(LOCK_LEDGER) as connection:
        return _ingest(store, connection, newest)


def _ingest(store: Store, connection: sa.Connection, newest: Mapping[str, Record]) -> Spent:
    prices = load_prices(connection)
    sums = _Sums()
    spent: Spent = defaultdict(int)
    holders: dict[tuple[str, str, str], int] = defaultdict(int)
    inserts, updates = [], []
    stored = _stored(store, connection, list(newest))
    for record in newest.values():
        row = _row(record, prices)
        old = stored.get(record.id)
        if old is None:
            inserts.append(row)
        elif record.status == "running" or (old["status"] != "running" and old["error"] != REAPED):
            continue
        else:
            updates.append({f"b_{name}": value for name, value in row.items()})
            if old["status"] != "running":
                sums.add(old, -1)
        if record.status != "running":
            sums.add(row, +1)
            for kind, window_start in record.windows.items():
                if record.tokens:
                    spent[record.key_id, kind, window_start] += record.tokens
                    holders[record.key_id, kind, record.process_id] += record.tokens
    if inserts:
        store.insert_rows(connection, t.requests, inserts)
    if updates:
        values: dict[str, Any] = {name: sa.bindparam(f"b_{name}") for name in _COLUMNS if name != "id"}
        connection.execute(
            sa.update(t.requests).where(t.requests.c.id == sa.bindparam("b_id")).values(values), updates
        )
    sums.store(store, connection)
    _spend(connection, spent, holders)
    return dict(spent)


def _spend(connection: sa.Connection, spent: Spent, holders: Mapping[tuple[str, str, str], int]) -> None:
    """Quota use grows and the processes' shares shrink by the same tokens, in one transaction with the rows."""
    pool, shares = t.limit_pools, t.limit_shares
    for (key_id, kind, window_start), tokens in sorted(spent.items()):
        this = sa.and_(pool.c.key_id == key_id, pool.c.kind == kind, pool.c.window_start == window_start)
        if connection.execute(sa.update(pool).where(this).values(used=pool.c.used + tokens)).rowcount:
            for (key, share_kind, holder), part in holders.items():
                if (key, share_kind) == (key_id, kind):
                    mine = sa.and_(shares.c.key_id == key, shares.c.kind == kind, shares.c.holder == holder)
                    left = sa.case((shares.c.amount > part, shares.c.amount - part), else_=0)
                    connection.execute(sa.update(shares).where(mine).values(amount=left))


def _row(record: Record, prices: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    row = msgspec.structs.asdict(record)
    del row["windows"]
    row["cost_nano"] = cost_nano(record, prices.get(record.model) or prices.get(record.alias))
    return row


def cost_nano(record: Record, price: Mapping[str, float] | None) -> int | None:
    """Spend in 1e-9 currency units: Σ tokens · price per million tokens · 1000. None without a price."""
    if price is None or record.status == "running":
        return None
    cached = record.cached_tokens or 0
    fresh = (record.prompt_tokens or 0) - cached
    amount = (
        fresh * price["prompt"]
        + cached * price["cached"]
        + (record.completion_tokens or 0) * price["completion"]
    )
    return round(amount * 1000)


def _stored(store: Store, connection: sa.Connection, ids: list[str]) -> dict[str, dict[str, Any]]:
    query = sa.select(t.requests).where(store.among(t.requests.c.id, ids))
    return {row["id"]: dict(row) for row in connection.execute(query).mappings()}


class _Sums:
    """What a batch adds to the rollups."""

    def __init__(self) -> None:
        self.rollups: dict[tuple[Any, ...], dict[str, int]] = defaultdict(
            lambda: dict.fromkeys(t.ROLLUP_SUMS, 0)
        )
        self.bins: dict[tuple[Any, ...], int] = defaultdict(int)

    def add(self, row: Mapping[str, Any], sign: int) -> None:
        """Counts an ended request in (+1) or, when its end is replaced, out again (-1)."""
        who = (row["key_id"], row["model"], row["upstream"], row["load_test"])
        for size in (60, DAY_S):
            start = int(row["started_at"] // size * size)
            sums = self.rollups[(size, start, *who)]
            sums["requests"] += sign
            sums[row["status"]] += sign
            for name in t.ROLLUP_SUMS[5:]:
                sums[name] += sign * round(row[name] or 0)
            if row["ttft_ms"] is not None:
                self.bins[(size, start, *who, bin_of(row["ttft_ms"]))] += sign

    def store(self, store: Store, connection: sa.Connection) -> None:
        for size, rollup, histogram in (
            (60, t.rollup_minute, t.ttft_minute),
            (DAY_S, t.rollup_day, t.ttft_day),
        ):
            rows = [
                dict(zip(t.ROLLUP_KEYS, key[1:], strict=True)) | sums
                for key, sums in self.rollups.items()
                if key[0] == size
            ]
            store.add_up(connection, rollup, t.ROLLUP_SUMS, rows)
            bins = [
                dict(zip((*t.ROLLUP_KEYS, "bin"), key[1:], strict=True)) | {"count": count}
                for key, count in self.bins.items()
                if key[0] == size
            ]
            store.add_up(connection, histogram, ["count"], bins)


# ---------------------------------------------------------------- leases


def register(store: Store, process_id: str, host: str, pid: int, ttl: float) -> float:
    """Takes a lease for a new process; returns the store's clock."""
    with store.write() as connection:
        now = store.now(connection)
        row = {"id": process_id, "host": host, "pid": pid, "started_at": now, "lease_until": now + ttl}
        connection.execute(sa.insert(t.processes), row)
        return now


def renew(store: Store, process_id: str, ttl: float) -> float:
    """Extends the lease; returns the store's clock. Raises LeaseLost when it was given away already."""
    with store.write() as connection:
        now = store.now(connection)
        mine = sa.and_(t.processes.c.id == process_id, t.processes.c.lease_until > now)
        if not connection.execute(sa.update(t.processes).where(mine).values(lease_until=now + ttl)).rowcount:
            raise pools.LeaseLost(process_id)
        return now


def expired(store: Store) -> list[str]:
    """Processes whose lease has run out."""
    with store.read() as connection:
        now = store.now(connection)
        query = sa.select(t.processes.c.id).where(t.processes.c.lease_until <= now)
        return list(connection.execute(query).scalars())


def alive(store: Store) -> int:
    """Processes that hold a lease."""
    with store.read() as connection:
        query = sa.select(sa.func.count()).select_from(t.processes)
        return int(
            connection.execute(query.where(t.processes.c.lease_until > store.now(connection))).scalar_one()
        )


def bury_orphans(store: Store, folder: Path, own: str) -> list[str]:
    """Takes in the journals of this host's dead processes, whose locks the kernel has dropped, and reaps
    them.
    """
    buried = []
    for process_id in journal.processes(folder):
        if process_id == own:
            continue
        with journal.orphan(folder, process_id) as files:
            if files is None:
                continue
            for path in files:
                _replay(store, path)
            reap(store, process_id, dead=True)
            buried.append(process_id)
    return buried


def _replay(store: Store, path: Path, batch_size: int = 2000) -> None:
    batch = []
    for record in journal.read(path):
        batch.append(record)
        if len(batch) == batch_size:
            ingest(store, batch)
            batch = []
    ingest(store, batch)


def reap(store: Store, process_id: str, dead: bool = False) -> int:
    """Ends what a dead process left: its running requests become `aborted`, its permits return.

    Does nothing while the lease runs, unless the process is known to be `dead`. Returns the requests ended.
    """
    with store.write(LOCK_LEDGER) as connection:
        now = store.now(connection)
        query = sa.select(t.processes.c.lease_until).where(t.processes.c.id == process_id)
        lease_until = connection.execute(query.with_for_update()).scalar()
        if lease_until is not None and lease_until > now and not dead:
            return 0
        running = sa.and_(t.requests.c.process_id == process_id, t.requests.c.status == "running")
        rows = [dict(row) for row in connection.execute(sa.select(t.requests).where(running)).mappings()]
        connection.execute(sa.update(t.requests).where(running).values(status="aborted", error=REAPED))
        sums = _Sums()
        for row in rows:
            sums.add(row | {"status": "aborted"}, +1)
        sums.store(store, connection)
        pools.forfeit(connection, process_id, now)
        connection.execute(sa.delete(t.processes).where(t.processes.c.id == process_id))
        return len(rows)


def prune(store: Store, keep_requests_s: float, keep_minutes_s: float, limit: int = 20_000) -> int:
    """Deletes request rows and minute rollups that are too old; day rollups stay. Bounded per call."""
    deleted = 0
    with store.write(LOCK_LEDGER) as connection:
        now = store.now(connection)
        old = (
            sa.select(t.requests.c.id)
            .where(t.requests.c.started_at < now - keep_requests_s, t.requests.c.status != "running")
            .limit(limit)
        )
        deleted += connection.execute(sa.delete(t.requests).where(t.requests.c.id.in_(old))).rowcount
        for table in (t.rollup_minute, t.ttft_minute):
            deleted += connection.execute(
                sa.delete(table).where(table.c.start < now - keep_minutes_s)
            ).rowcount
    return deleted
