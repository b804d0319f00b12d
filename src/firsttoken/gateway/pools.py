"""Limits in the store: each is a pool of permits, of which every gateway process holds a share.

The rule that makes a limit of N exact, whatever the number of processes: permits are things. There are N of
them; each lies in the pool or in exactly one process's share, and moves only inside a transaction that holds
the pool's row. A process admits requests from its own share without asking anybody (see `limits.py`), so the
database is off the path to the first token, and yet no interleaving can use an (N+1)th permit.

- `concurrency`: a permit is busy while its request runs.
- `rpm`, `tpm`: a permit is used and then cools down for 60 s. As no permit is used twice within 60 s, no 60 s
  window, wherever it starts, holds more than N.
- `quota_*`: a permit (a token) is used up until the window ends. `used` in the pool's row counts settled tokens;
  it grows in the ledger's own transaction, with the request's row.

A process that ends without saying so keeps its permits until its lease has expired; rate permits then cool
down for another 60 s, as if all had just been used.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from firsttoken.gateway import tables as t
from firsttoken.gateway.store import Store

COOLDOWN_S = 60.0
WANTED_S = 10.0
"""How long a pool that somebody found empty is not hoarded from."""
FIVE_HOURS_S = 5 * 3600.0


class LeaseLost(Exception):
    """This process's lease expired and its permits were given to others."""


@dataclass(frozen=True, slots=True)
class Need:
    """A limit of one key, how many permits of it a request wants, and how many the process gives back first."""

    kind: str
    capacity: int
    amount: int
    surplus: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """What a process got of one pool."""

    kind: str
    amount: int
    window_start: float
    """Quotas: the window that these permits belong to. Else 0."""
    window_end: float
    available: int
    """Left in the pool; negative when more is out than the (lowered) capacity."""
    held_elsewhere: int
    """Permits in other processes' shares, idle or not."""


def window(kind: str, now: float, start: float = 0.0) -> tuple[float, float]:
    """The quota window (start, end) that holds `now`, where `start` is that of the last one known.

    Five hours begin with the first request after the previous five have passed; weeks on Monday and months on
    the 1st, at 00:00 UTC.
    """
    if kind == "quota_5h":
        if not start <= now < start + FIVE_HOURS_S:
            start = now
        return start, start + FIVE_HOURS_S
    today = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    if kind == "quota_week":
        first = today - datetime.timedelta(days=today.weekday())
        return first.timestamp(), (first + datetime.timedelta(days=7)).timestamp()
    if kind == "quota_month":
        first = today.replace(day=1)
        return first.timestamp(), (first + datetime.timedelta(days=32)).replace(day=1).timestamp()
    return 0.0, float("inf")


def acquire(store: Store, process_id: str, key_id: str, needs: Sequence[Need]) -> dict[str, Grant]:
    """Takes permits for one key: at least what is needed where the pool has it, and a slice ahead.

    The slice: all of what is left if this process is alone, else its part of it; nothing ahead from a pool that
    somebody found empty. Raises LeaseLost.
    """
    grants = {}
    with store.write() as connection:
        now = store.now(connection)
        _hold_lease(connection, process_id, now)
        alive = connection.execute(
            sa.select(sa.func.count()).select_from(t.processes).where(t.processes.c.lease_until > now)
        ).scalar_one()
        for need in sorted(needs, key=lambda need: need.kind):
            grants[need.kind] = _acquire(store, connection, process_id, key_id, need, now, alive)
    return grants


def _acquire(
    store: Store, connection: sa.Connection, process_id: str, key_id: str, need: Need, now: float, alive: int
) -> Grant:
    pool, shares = t.limit_pools, t.limit_shares
    this_pool = sa.and_(pool.c.key_id == key_id, pool.c.kind == need.kind)
    these_shares = sa.and_(shares.c.key_id == key_id, shares.c.kind == need.kind)
    fresh = {"key_id": key_id, "kind": need.kind, "window_start": 0.0, "used": 0, "wanted_until": 0.0}
    connection.execute(store.insert(pool).on_conflict_do_nothing(), fresh)
    row = connection.execute(sa.select(pool).where(this_pool).with_for_update()).one()

    start, end = window(need.kind, now, row.window_start)
    used = row.used
    if start != row.window_start:
        connection.execute(sa.update(pool).where(this_pool).values(window_start=start, used=0))
        connection.execute(sa.delete(shares).where(these_shares))
        used = 0
    connection.execute(sa.delete(shares).where(these_shares, shares.c.free_at <= now))
    if need.surplus:
        give_back(connection, process_id, key_id, need.kind, need.surplus)

    held = connection.execute(sa.select(shares.c.holder, shares.c.amount).where(these_shares)).all()
    elsewhere = sum(share.amount for share in held if share.holder != process_id)
    available = need.capacity - used - sum(share.amount for share in held)
    wanted = row.wanted_until > now
    ahead = 0 if wanted else available // alive
    amount = min(available, max(need.amount, ahead)) if available >= need.amount else 0
    if amount:
        share = {"key_id": key_id, "kind": need.kind, "holder": process_id, "amount": amount, "free_at": None}
        store.add_up(connection, shares, ["amount"], [share])
    elif need.amount and elsewhere:
        connection.execute(sa.update(pool).where(this_pool).values(wanted_until=now + WANTED_S))
    return Grant(
        need.kind, amount, start if need.kind.startswith("quota") else 0.0, end, available - amount, elsewhere
    )


def give_back(connection: sa.Connection, process_id: str, key_id: str, kind: str, amount: int) -> None:
    """Returns permits that no request of this process uses to their pool."""
    shares = t.limit_shares
    mine = sa.and_(shares.c.key_id == key_id, shares.c.kind == kind, shares.c.holder == process_id)
    connection.execute(
        sa.update(shares).where(mine, shares.c.amount >= amount).values(amount=shares.c.amount - amount)
    )
    connection.execute(sa.delete(shares).where(mine, shares.c.amount <= 0))


def release(store: Store, process_id: str, amounts: Mapping[tuple[str, str], int]) -> None:
    """Returns idle permits, by (key id, kind). Raises LeaseLost."""
    with store.write() as connection:
        _hold_lease(connection, process_id, store.now(connection))
        for (key_id, kind), amount in sorted(amounts.items()):
            _lock(connection, key_id, kind)
            give_back(connection, process_id, key_id, kind, amount)


def wanted(store: Store, process_id: str) -> list[tuple[str, str]]:
    """Pools (key id, kind) that somebody found empty of late and of which this process holds a share."""
    pool, shares = t.limit_pools, t.limit_shares
    same = sa.and_(pool.c.key_id == shares.c.key_id, pool.c.kind == shares.c.kind)
    with store.read() as connection:
        now = store.now(connection)
        query = (
            sa.select(pool.c.key_id, pool.c.kind)
            .join(shares, same)
            .where(pool.c.wanted_until > now, shares.c.holder == process_id)
        )
        return [(row.key_id, row.kind) for row in connection.execute(query)]


def leave(store: Store, process_id: str, cooling: Mapping[tuple[str, str], tuple[int, float]]) -> None:
    """The orderly end of a process: every permit returns, but those that cool down do so when they are cool.

    `cooling` is (key id, kind) → (permits, time when the last of them is cool).
    """
    shares = t.limit_shares
    with store.write() as connection:
        for (key_id, kind), (amount, free_at) in sorted(cooling.items()):
            mine = sa.and_(shares.c.key_id == key_id, shares.c.kind == kind, shares.c.holder == process_id)
            connection.execute(sa.update(shares).where(mine).values(amount=amount, free_at=free_at))
        connection.execute(sa.delete(shares).where(shares.c.holder == process_id, shares.c.free_at.is_(None)))
        connection.execute(sa.delete(t.processes).where(t.processes.c.id == process_id))


def forfeit(connection: sa.Connection, process_id: str, now: float) -> None:
    """The permits of a process that died: free for others, rate permits after a full cool-down."""
    shares = t.limit_shares
    mine = sa.and_(shares.c.holder == process_id, shares.c.free_at.is_(None))
    rate = shares.c.kind.in_(("rpm", "tpm"))
    connection.execute(sa.update(shares).where(mine, rate).values(free_at=now + COOLDOWN_S))
    connection.execute(sa.delete(shares).where(mine, ~rate))


def _lock(connection: sa.Connection, key_id: str, kind: str) -> None:
    pool = t.limit_pools
    query = sa.select(pool.c.used).where(pool.c.key_id == key_id, pool.c.kind == kind)
    connection.execute(query.with_for_update()).all()


def _hold_lease(connection: sa.Connection, process_id: str, now: float) -> None:
    """Fails unless this process's lease is good; nobody can take it before this transaction ends."""
    query = sa.select(t.processes.c.lease_until).where(t.processes.c.id == process_id)
    lease_until = connection.execute(query.with_for_update(read=True)).scalar()
    if lease_until is None or lease_until <= now:
        raise LeaseLost(process_id)
