"""The limiter in memory: sliding windows, reservations and settlements, and several processes on one store."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.gateway import ledger, limits
from firsttoken.gateway.accounts import Key
from firsttoken.gateway.limits import Limiter, Permit, Refused, Share
from firsttoken.gateway.store import Store


def key(**capacities: int) -> Key:
    return Key(id="k", name="k", digest="", hint="", role="client", limits=tuple(sorted(capacities.items())))


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def limiter(store: Store, executor: ThreadPoolExecutor, name: str = "a") -> Limiter:
    now = ledger.register(store, name, "host", 1, 1e6)
    offset = now - time.monotonic()
    one = Limiter(store, executor, lambda: time.monotonic() + offset)
    one.process_id, one.fence = name, now + 1e6
    return one


# A process alone with its whole share: only the memory part, so hypothesis may try many histories.

events = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 60), st.integers(0, 90)), min_size=1, max_size=60
)


@settings(max_examples=60, deadline=None)
@given(events, st.integers(1, 8), st.integers(20, 200))
def test_no_sixty_seconds_hold_more_than_the_limits(
    history: list[tuple[float, int, int]], rpm: int, tpm: int
) -> None:
    clock = Clock()
    one = Limiter(None, None, clock)  # type: ignore[arg-type]  # never asked: the share is whole
    one.fence = 1e12
    one.shares["k"] = {"rpm": Share("rpm", rpm, rpm), "tpm": Share("tpm", tpm, tpm)}
    k = key(rpm=rpm, tpm=tpm)
    admitted: list[tuple[float, int, int]] = []  # time, reserved, used
    for pause, reserve, used in history:
        clock.now += pause
        permit = one.try_admit(k, reserve)
        if permit is not None:
            one.settle(permit, used)
            one.settle(permit, used)  # a second time changes nothing
            admitted.append((clock.now, reserve, used))
    for start, _, _ in admitted:
        window = [event for event in admitted if start <= event[0] < start + 60]
        assert len(window) <= rpm
        over = sum(max(0, used - reserved) for _, reserved, used in window)
        assert sum(used for _, _, used in window) <= tpm + over
    share = one.shares["k"]["tpm"]
    clock.now += 61
    assert share.idle(clock.now) == tpm, "every permit comes back"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4))
def test_concurrency_is_exact(acts: list[int], capacity: int) -> None:
    one = Limiter(None, None, Clock())  # type: ignore[arg-type]
    one.fence = 1e12
    one.shares["k"] = {"concurrency": Share("concurrency", capacity, capacity)}
    running: list[Permit] = []
    for act in acts:
        if act and running:
            one.settle(running.pop(act % len(running)), 0)
        else:
            permit = one.try_admit(key(concurrency=capacity), 1)
            assert (permit is None) == (len(running) == capacity)
            if permit:
                running.append(permit)


async def test_a_refusal_says_when_to_come_back(store: Store, executor: ThreadPoolExecutor) -> None:
    one = limiter(store, executor)
    k = key(rpm=2)
    await one.admit(k, 1)
    await one.admit(k, 1)
    with pytest.raises(Refused) as refused:
        await one.admit(k, 1)
    assert refused.value.kind == "rpm"
    assert 59 < refused.value.retry_after <= 60
    assert one.remaining(k)["rpm"][:2] == (2, 0)


async def test_zero_means_nothing_and_too_large_a_reservation_is_refused(
    store: Store, executor: ThreadPoolExecutor
) -> None:
    one = limiter(store, executor)
    with pytest.raises(Refused):
        await one.admit(key(rpm=0), 1)
    with pytest.raises(Refused, match="reserves 500"):
        await one.admit(key(tpm=100), 500)


async def test_quota_is_reserved_settled_and_ledgered(store: Store, executor: ThreadPoolExecutor) -> None:
    one = limiter(store, executor)
    k = key(quota_month=100)
    permit = await one.admit(k, 60)
    with pytest.raises(Refused):
        await one.admit(k, 60)
    one.settle(permit, 30)
    share = one.shares["k"]["quota_month"]
    assert share.idle(one.clock()) == 70
    one.ledgered({("k", "quota_month", permit.windows["quota_month"]): 30})
    assert share.idle(one.clock()) == 70
    permit = await one.admit(k, 70)
    one.settle(permit, 70)
    with pytest.raises(Refused):
        await one.admit(k, 1)


async def test_two_processes_pass_idle_permits_on_and_never_exceed(
    store: Store, executor: ThreadPoolExecutor
) -> None:
    k = key(concurrency=5)
    both = [limiter(store, executor, name) for name in ("a", "b")]
    ticking = asyncio.create_task(_tick(both))
    running: list[tuple[Limiter, Permit]] = []
    refusals = 0
    try:
        for step, one in zip(range(40), itertools.cycle(both)):
            if step % 8 == 7:
                owner, permit = running.pop(0)
                owner.settle(permit, 0)
                await asyncio.sleep(limits.REFUSE_AGAIN_S)  # for so long a refusal is not thought over
            try:
                running.append((one, await one.admit(k, 1)))
            except Refused:
                refusals += 1
                assert len(running) == 5, "refused although a permit was idle somewhere"
            assert len(running) <= 5
    finally:
        ticking.cancel()
    assert refusals > 5


async def _tick(both: list[Limiter]) -> None:
    while True:
        for one in both:
            await one.tick()
        await asyncio.sleep(limits.TICK_S)


async def test_lowering_a_limit_holds_at_once_and_for_all_processes(
    store: Store, executor: ThreadPoolExecutor
) -> None:
    both = [limiter(store, executor, name) for name in ("a", "b")]
    for one in both:  # each holds a part of the old limit
        await one.admit(key(rpm=40), 1)
    passed = 0
    for one in both * 10:
        try:
            await one.admit(key(rpm=4), 1)
            passed += 1
        except Refused:
            await one.tick()
    assert passed == 2, "two of four were used before the change"


async def test_raising_a_limit_holds_at_once(store: Store, executor: ThreadPoolExecutor) -> None:
    one = limiter(store, executor)
    await one.admit(key(rpm=1), 1)
    with pytest.raises(Refused):
        await one.admit(key(rpm=1), 1)
    one.shares["k"]["rpm"].refused_until = 0
    await one.admit(key(rpm=3), 1)


async def test_nothing_passes_beyond_the_lease(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    store = Store(f"sqlite:///{tmp_path / 'g.db'}")
    store.migrate()
    one = limiter(store, executor)
    await one.admit(key(rpm=10), 1)
    one.fence = one.clock() - 1
    with pytest.raises(limits.Unavailable):
        await one.admit(key(rpm=10), 1)
    await one.admit(key(), 1)  # without limits there is nothing to keep
    store.close()
