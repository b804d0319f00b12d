"""Limits in the store: whatever processes do, a limit of N is never N + 1."""

from __future__ import annotations

import datetime
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.gateway import ledger, pools
from firsttoken.gateway import tables as t
from firsttoken.gateway.pools import Need
from firsttoken.gateway.store import Store


def register(store: Store, *names: str) -> None:
    for name in names:
        ledger.register(store, name, "host", 1, 60.0)


def held(store: Store, kind: str) -> int:
    with store.read() as connection:
        return int(
            connection.execute(
                sa.select(sa.func.sum(t.limit_shares.c.amount)).where(t.limit_shares.c.kind == kind)
            ).scalar()
            or 0
        )


def test_a_lone_process_gets_the_whole_limit_and_two_share_it(store: Store) -> None:
    register(store, "a")
    assert pools.acquire(store, "a", "key", [Need("rpm", 100, 1)])["rpm"].amount == 100
    register(store, "b")
    refused = pools.acquire(store, "b", "key", [Need("rpm", 100, 1)])["rpm"]
    assert (refused.amount, refused.held_elsewhere) == (0, 100)
    assert pools.wanted(store, "a") == [("key", "rpm")]
    pools.release(store, "a", {("key", "rpm"): 70})
    granted = pools.acquire(store, "b", "key", [Need("rpm", 100, 1)])["rpm"]
    assert granted.amount == 1, "nothing is taken ahead from a pool that somebody found empty"
    assert held(store, "rpm") == 31


def test_many_processes_at_once_never_hold_more_than_the_limit(store: Store) -> None:
    names = [f"p{i}" for i in range(6)]
    register(store, *names)
    capacity, peak, lock = 17, [], threading.Lock()
    out = 0

    def run(name: str) -> None:
        nonlocal out
        draw = random.Random(name)
        mine = 0
        for _ in range(12):
            need = draw.randint(1, 5)
            got = pools.acquire(store, name, "key", [Need("concurrency", capacity, need)])[
                "concurrency"
            ].amount
            with lock:
                out += got
                peak.append(out)
            mine += got
            back = draw.randint(0, mine)
            if back:
                with lock:
                    out -= back  # before the store has them again: `out` is never too high by it
                pools.release(store, name, {("key", "concurrency"): back})
                mine -= back

    with ThreadPoolExecutor(len(names)) as executor:
        list(executor.map(run, names))
    assert max(peak) <= capacity
    assert held(store, "concurrency") == out
    assert max(peak) > capacity // 2, "the test must come near the limit"


def test_permits_of_a_dead_process_return_and_rates_only_when_cool(store: Store) -> None:
    register(store, "dead", "alive")
    pools.acquire(store, "dead", "key", [Need("rpm", 10, 10), Need("concurrency", 10, 10)])
    assert ledger.reap(store, "dead") == 0, "its lease still runs"
    assert held(store, "rpm") == 10
    ledger.reap(store, "dead", dead=True)
    grants = pools.acquire(store, "alive", "key", [Need("rpm", 10, 1), Need("concurrency", 10, 1)])
    assert grants["rpm"].amount == 0
    assert grants["concurrency"].amount == 10
    with store.write() as connection:
        assert (
            connection.execute(
                sa.update(t.limit_shares).where(t.limit_shares.c.free_at > 0).values(free_at=1.0)
            ).rowcount
            == 1
        )
    assert pools.acquire(store, "alive", "key", [Need("rpm", 10, 1)])["rpm"].amount >= 1


def test_without_a_lease_nothing_is_granted(store: Store) -> None:
    with pytest.raises(pools.LeaseLost):
        pools.acquire(store, "nobody", "key", [Need("rpm", 10, 1)])
    ledger.register(store, "late", "host", 1, ttl=-1.0)
    with pytest.raises(pools.LeaseLost):
        pools.acquire(store, "late", "key", [Need("rpm", 10, 1)])
    with pytest.raises(pools.LeaseLost):
        ledger.renew(store, "late", 60.0)


def test_a_quota_starts_anew_when_its_window_ends(store: Store) -> None:
    register(store, "a")
    grant = pools.acquire(store, "a", "key", [Need("quota_5h", 1000, 10)])["quota_5h"]
    assert grant.amount == 1000
    assert grant.window_end - grant.window_start == 5 * 3600
    with store.write() as connection:  # five hours later
        connection.execute(sa.update(t.limit_pools).values(window_start=time.time() - 5 * 3600 - 1, used=900))
    again = pools.acquire(store, "a", "key", [Need("quota_5h", 1000, 10)])["quota_5h"]
    assert again.amount == 1000
    assert again.window_start > grant.window_start


@given(st.floats(1e9, 4e9))
def test_calendar_windows_hold_the_time_and_meet(now: float) -> None:
    for kind in ("quota_week", "quota_month"):
        start, end = pools.window(kind, now)
        assert start <= now < end
        assert pools.window(kind, end)[0] == end
        first = datetime.datetime.fromtimestamp(start, datetime.UTC)
        assert (first.hour, first.minute, first.second) == (0, 0, 0)
        assert first.weekday() == 0 if kind == "quota_week" else first.day == 1
