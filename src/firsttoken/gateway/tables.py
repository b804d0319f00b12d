"""The store's tables. Times are seconds since the epoch (UTC); tokens and counts only ever add up.

Prompts and answers have no column, on purpose: the gateway never stores them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

plans = sa.Table(
    "plans",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(100), nullable=False, unique=True),
    sa.Column("models", sa.JSON),  # null: every model
    sa.Column("quota_5h", sa.BigInteger),
    sa.Column("quota_week", sa.BigInteger),
    sa.Column("quota_month", sa.BigInteger),
    sa.Column("priority", sa.String(16), nullable=False),
    sa.Column("upstream", sa.String(100)),
    sa.Column("created_at", sa.Double, nullable=False),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False, unique=True),  # SHA-256 of the key, hexadecimal
    sa.Column("hint", sa.String(16), nullable=False),  # the first characters, to tell keys apart
    sa.Column("role", sa.String(8), nullable=False),  # client | admin
    sa.Column("plan_id", sa.String(32), sa.ForeignKey("plans.id")),
    sa.Column("models", sa.JSON),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("rpm", sa.BigInteger),
    sa.Column("tpm", sa.BigInteger),
    sa.Column("max_concurrency", sa.BigInteger),
    sa.Column("expires_at", sa.Double),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("revoked_at", sa.Double),
)
# A name may be used again once its key is revoked.
sa.Index(
    "uq_keys_live_name",
    keys.c.name,
    unique=True,
    sqlite_where=keys.c.revoked_at.is_(None),
    postgresql_where=keys.c.revoked_at.is_(None),
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    # currency units per million tokens
    sa.Column("prompt", sa.Double, nullable=False),
    sa.Column("cached", sa.Double, nullable=False),
    sa.Column("completion", sa.Double, nullable=False),
)

aliases = sa.Table(
    "aliases",  # switched at run time; they win over the configuration file's
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("target", sa.String(200), nullable=False),
)

counters = sa.Table(
    "counters",  # "settings_version": grows with each change of keys, plans, prices or aliases
    metadata,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)

processes = sa.Table(
    "processes",  # a row per gateway process that holds a lease
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("lease_until", sa.Double, nullable=False),
)

limit_pools = sa.Table(
    "limit_pools",  # one per key and limit; its row is locked while shares of it are given out
    metadata,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("kind", sa.String(12), primary_key=True),
    sa.Column("window_start", sa.Double, nullable=False),  # quotas: the running window; else 0
    sa.Column("used", sa.BigInteger, nullable=False),  # quotas: tokens settled in it
    sa.Column("wanted_until", sa.Double, nullable=False),  # a process found it empty: give back what idles
    sa.Index(None, "wanted_until"),
)

limit_shares = sa.Table(
    "limit_shares",  # permits of a pool that a process holds, or that cool down (free_at) after its end
    metadata,
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("kind", sa.String(12), primary_key=True),
    sa.Column("holder", sa.String(32), primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Column("free_at", sa.Double),  # null: held by the live process `holder`
    sa.Index(None, "holder"),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("client_id", sa.String(128)),  # the caller's X-Request-Id
    sa.Column("process_id", sa.String(32), nullable=False),
    sa.Column("key_id", sa.String(32), nullable=False),
    sa.Column("load_test", sa.Boolean, nullable=False),
    sa.Column("endpoint", sa.String(32), nullable=False),
    sa.Column("alias", sa.String(200), nullable=False),  # the name that the client used
    sa.Column("model", sa.String(200), nullable=False),  # the name at the upstream
    sa.Column("upstream", sa.String(100), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("stream", sa.Boolean, nullable=False),
    sa.Column("status", sa.String(8), nullable=False),  # running | ok | error | aborted | limited
    sa.Column("http_status", sa.Integer),
    sa.Column("error", sa.String(300)),
    sa.Column("started_at", sa.Double, nullable=False),
    # milliseconds; null: not known
    sa.Column("gateway_ms", sa.Double),
    sa.Column("queue_ms", sa.Double),
    sa.Column("prefill_ms", sa.Double),
    sa.Column("first_decode_ms", sa.Double),
    sa.Column("ttft_ms", sa.Double),
    sa.Column("duration_ms", sa.Double),
    # tokens; null: not known
    sa.Column("prompt_tokens", sa.BigInteger),
    sa.Column("cached_tokens", sa.BigInteger),
    sa.Column("completion_tokens", sa.BigInteger),
    sa.Column("drafted_tokens", sa.BigInteger),
    sa.Column("accepted_tokens", sa.BigInteger),
    sa.Column("cost_nano", sa.BigInteger),  # 1e-9 currency units
    sa.Index(None, "started_at"),
    sa.Index("ix_requests_key_started", "key_id", "started_at"),
    sa.Index("ix_requests_status_started", "status", "started_at"),
    sa.Index("ix_requests_ttft", "ttft_ms"),
    sa.Index("ix_requests_process_status", "process_id", "status"),
)

ROLLUP_KEYS = ("start", "key_id", "model", "upstream", "load_test")
ROLLUP_SUMS = (
    "requests",
    "ok",
    "error",
    "aborted",
    "limited",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "cost_nano",
    "duration_ms",
)


def _rollup_keys() -> list[sa.Column[Any]]:
    return [
        sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column("model", sa.String(200), primary_key=True),
        sa.Column("upstream", sa.String(100), primary_key=True),
        sa.Column("load_test", sa.Boolean, primary_key=True),
    ]


def _rollup(name: str) -> sa.Table:
    sums = [sa.Column(column, sa.BigInteger, nullable=False) for column in ROLLUP_SUMS]
    return sa.Table(name, metadata, *_rollup_keys(), *sums)


def _histogram(name: str) -> sa.Table:
    """TTFT: `count` requests in `bin` (see `histogram.py`); empty bins have no row."""
    bin_columns = [
        sa.Column("bin", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("count", sa.BigInteger, nullable=False),
    ]
    return sa.Table(name, metadata, *_rollup_keys(), *bin_columns)


rollup_minute = _rollup("rollup_minute")
rollup_day = _rollup("rollup_day")
ttft_minute = _histogram("ttft_minute")
ttft_day = _histogram("ttft_day")

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", sa.String(100), nullable=False),
    sa.Column("action", sa.String(40), nullable=False),
    sa.Column("target", sa.String(200), nullable=False),
    sa.Column("detail", sa.JSON, nullable=False),
    sa.Index(None, "at"),
)
