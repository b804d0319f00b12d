"""What the admin API and the console show: usage over time, the TTFT's distribution, single requests.

Sums and percentiles come from the rollups, never from the requests, so a page over a million requests opens at
once. Load-test traffic is left out unless it is asked for.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from firsttoken.engine.config import ConfigError
from firsttoken.gateway import tables as t
from firsttoken.gateway.histogram import percentile
from firsttoken.gateway.ledger import DAY_S

GROUPS = ("key", "model", "upstream", "time")
MINUTE_SPAN_S = 2 * DAY_S
"""Longer spans are answered from the day rollups."""
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which requests: started in [since, until), seconds since the epoch."""

    since: float
    until: float
    key_id: str | None = None
    model: str | None = None
    upstream: str | None = None
    load_test: bool = False
    """Include load-test traffic."""


def usage(
    connection: sa.Connection, which: Selection, by: tuple[str, ...] = (), step: int = 60
) -> list[dict[str, Any]]:
    """Sums and TTFT percentiles per group, `by` some of GROUPS; `step` is the width of a time group in seconds.

    Each row: the group's names (`key` is a key's id), requests, ok, error, aborted, limited, the token sums,
    cost_nano, duration_ms (a sum), ttft_ms: {p50, p95, p99} (null without streams) and ttft_count. Spans over two
    days come from day rollups: their ends are rounded to whole days and `step` to at least one.
    """
    for name in by:
        if name not in GROUPS:
            raise ConfigError(f"by: {name!r} is none of {', '.join(GROUPS)}")
    days = which.until - which.since > MINUTE_SPAN_S
    size = DAY_S if days else 60
    step = max(size, step // size * size)
    if "time" in by and (which.until - which.since) / step > MAX_POINTS:
        raise ConfigError(f"step: more than {MAX_POINTS} points; choose a larger step")
    rollup, histogram = (t.rollup_day, t.ttft_day) if days else (t.rollup_minute, t.ttft_minute)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    sums = [sa.func.sum(rollup.c[name]).label(name) for name in t.ROLLUP_SUMS]
    for row in _grouped(connection, rollup, sums, which, by, step, size):
        rows[tuple(row[name] for name in by)] = {
            **{name: row[name] for name in by},
            **{name: int(row[name] or 0) for name in t.ROLLUP_SUMS},
            "ttft_ms": None,
            "ttft_count": 0,
        }
    counts: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    total = sa.func.sum(histogram.c.count).label("count")
    for row in _grouped(
        connection, histogram, [histogram.c.bin, total], which, by, step, size, histogram.c.bin
    ):
        if row["count"]:
            counts[tuple(row[name] for name in by)][row["bin"]] = int(row["count"])
    for group, bins in counts.items():
        if group in rows:
            rows[group]["ttft_ms"] = {f"p{share}": percentile(bins, share / 100) for share in (50, 95, 99)}
            rows[group]["ttft_count"] = sum(bins.values())
    return sorted(rows.values(), key=lambda row: (row.get("time", 0), -row["requests"]))


def distribution(connection: sa.Connection, which: Selection) -> dict[int, int]:
    """Bin (see `histogram.py`) → requests with such a TTFT."""
    days = which.until - which.since > MINUTE_SPAN_S
    table = t.ttft_day if days else t.ttft_minute
    total = sa.func.sum(table.c.count).label("count")
    rows = _grouped(
        connection, table, [table.c.bin, total], which, (), 60, DAY_S if days else 60, table.c.bin
    )
    return {row["bin"]: int(row["count"]) for row in rows if row["count"]}


def _grouped(
    connection: sa.Connection,
    table: sa.Table,
    columns: list[Any],
    which: Selection,
    by: tuple[str, ...],
    step: int,
    size: int,
    *more: Any,
) -> Iterable[sa.RowMapping]:
    names: dict[str, Any] = {
        "key": table.c.key_id,
        "model": table.c.model,
        "upstream": table.c.upstream,
        "time": table.c.start - table.c.start % step,
    }
    groups = [names[name].label(name) for name in by]
    query = sa.select(*groups, *columns).where(
        table.c.start >= which.since // size * size, table.c.start < which.until
    )
    for column, value in (
        (table.c.key_id, which.key_id),
        (table.c.model, which.model),
        (table.c.upstream, which.upstream),
    ):
        if value is not None:
            query = query.where(column == value)
    if not which.load_test:
        query = query.where(table.c.load_test.is_(False))
    if groups or more:
        query = query.group_by(*[names[name] for name in by], *more)
    else:
        query = query.having(sa.func.count() > 0)
    return connection.execute(query).mappings().all()


ORDERS = {
    "newest": t.requests.c.started_at.desc(),
    "slowest": t.requests.c.ttft_ms.desc().nulls_last(),
}


def requests(
    connection: sa.Connection,
    which: Selection,
    status: str | None = None,
    order: str = "newest",
    limit: int = 100,
    offset: int = 0,
) -> list[dict[str, Any]]:
    """Single requests: every column of the table, and where the time went (`parts`, milliseconds)."""
    if order not in ORDERS:
        raise ConfigError(f"order: {order!r} is none of {', '.join(ORDERS)}")
    table = t.requests
    query = sa.select(table).where(table.c.started_at >= which.since, table.c.started_at < which.until)
    filters = {"key_id": which.key_id, "model": which.model, "upstream": which.upstream, "status": status}
    for name, value in filters.items():
        if value is not None:
            query = query.where(table.c[name] == value)
    if not which.load_test:
        query = query.where(table.c.load_test.is_(False))
    if order == "slowest":
        query = query.where(table.c.ttft_ms.is_not(None))
    rows = connection.execute(
        query.order_by(ORDERS[order], table.c.id).limit(limit).offset(offset)
    ).mappings()
    return [{**row, "parts": parts(row)} for row in rows]


def request(connection: sa.Connection, id: str) -> dict[str, Any] | None:
    row = connection.execute(sa.select(t.requests).where(t.requests.c.id == id)).mappings().first()
    return {**row, "parts": parts(row)} if row else None


def parts(row: sa.RowMapping) -> dict[str, float | None]:
    """Where a request's time went, in milliseconds; None where the upstream did not tell.

    gateway: received → forwarded; queue, prefill: the engine's own; other: the rest of the TTFT (network, template,
    tokens' way out); first_decode: first → second token, after the TTFT.
    """
    known = [row[f"{name}_ms"] for name in ("gateway", "queue", "prefill")]
    other = None if row["ttft_ms"] is None else max(0.0, row["ttft_ms"] - sum(part or 0.0 for part in known))
    return {
        "gateway": row["gateway_ms"],
        "queue": row["queue_ms"],
        "prefill": row["prefill_ms"],
        "other": other,
        "first_decode": row["first_decode_ms"],
    }


def quotas(connection: sa.Connection, key_id: str) -> dict[str, dict[str, float]]:
    """Quota kind → tokens settled in the running window (`used`), and when it began."""
    pool = t.limit_pools
    query = sa.select(pool).where(pool.c.key_id == key_id, pool.c.kind.like("quota%"))
    return {
        row["kind"]: {"used": row["used"], "window_start": row["window_start"]}
        for row in connection.execute(query).mappings()
    }


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Usage rows as CSV; spend in currency units. Cells that a spreadsheet would run as a formula are
    quoted.
    """
    out = io.StringIO()
    flat = [_flat(row) for row in rows]
    writer = csv.DictWriter(out, fieldnames=list(flat[0]) if flat else ["requests"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat = {name: _harmless(value) for name, value in row.items() if name not in ("ttft_ms", "cost_nano")}
    flat["spend"] = f"{row['cost_nano'] / 1e9:.9f}"
    for name in ("p50", "p95", "p99"):
        value = (row["ttft_ms"] or {}).get(name)
        flat[f"ttft_{name}_ms"] = "" if value is None else f"{value:.1f}"
    return flat


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
