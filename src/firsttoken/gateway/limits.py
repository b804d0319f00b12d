"""Limits on the hot path: admission from this process's own share of each limit, without the database.

`Limiter.admit` first looks at the shares in memory (a few microseconds). Only when they don't suffice does it ask
the store for more, in the store's thread; a lone process asks once per key, since it then holds the whole limit.
With several processes idle permits flow back to a pool as soon as somebody finds it empty (`tick`), so a refusal
waits up to RECALL_S for permits that idle elsewhere. See `pools.py` for why no limit is ever exceeded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from firsttoken.gateway import pools
from firsttoken.gateway.accounts import Key
from firsttoken.gateway.store import Store

RECALL_S = 0.3
"""How long a refusal waits for permits that other processes may hold idle; they look every TICK_S."""
TICK_S = 0.1
REFUSE_AGAIN_S = 0.1
"""After a refusal by the store, the same key is refused for this long without asking again."""

NAMES = {
    "rpm": "requests per minute",
    "tpm": "tokens per minute",
    "concurrency": "concurrent requests",
    "quota_5h": "tokens per 5 hours",
    "quota_week": "tokens per week",
    "quota_month": "tokens per month",
}


class Refused(Exception):
    """A limit says no; `retry_after` is in seconds."""

    def __init__(self, kind: str, capacity: int, retry_after: float, needed: int):
        self.kind, self.capacity, self.retry_after = kind, capacity, retry_after
        asked = f" (this request reserves {needed})" if kind not in ("rpm", "concurrency") else ""
        super().__init__(
            f"Rate limit reached for {NAMES[kind]}: {capacity}{asked}. Retry in {math.ceil(retry_after)} s."
        )


class Unavailable(Exception):
    """The store can't be asked and this process's lease has run out: limits can't be kept, so nothing
    passes.
    """


@dataclass(slots=True)
class Share:
    """This process's permits of one limit of one key: idle, busy, cooling or spent."""

    kind: str
    capacity: int
    amount: int = 0
    """Permits held; the store knows this number."""
    busy: int = 0
    """Reserved by running requests (concurrency, quotas)."""
    spent: int = 0
    """Quotas: settled here, not yet in the ledger."""
    cooling_sum: int = 0
    cooling: deque[list[float]] | None = None
    """Rates: [when cool, permits], oldest first."""
    window_start: float = 0.0
    window_end: float = math.inf
    over: bool = False
    """The limit was lowered below what is out: give back, admit nothing, until the pool says it fits."""
    elsewhere: int = 0
    """Permits that other processes held at the last look."""
    refused_until: float = 0.0

    def idle(self, now: float) -> int:
        """Permits ready for use at `now` (seconds since the epoch, the store's clock)."""
        if now >= self.window_end:
            self.amount = self.busy = self.spent = 0
            self.window_start, self.window_end = -1.0, math.inf
        if self.cooling:
            while self.cooling and self.cooling[0][0] <= now:
                self.cooling_sum -= int(self.cooling.popleft()[1])
        return self.amount - self.busy - self.spent - self.cooling_sum

    def retry_after(self, now: float, needed: int) -> float:
        """Seconds until `needed` permits may be idle, as far as this process can tell."""
        if self.kind.startswith("quota"):
            return max(1.0, self.window_end - now) if self.window_end < math.inf else 60.0
        if self.cooling:
            missing = needed - self.idle(now)
            for cool_at, permits in self.cooling:
                missing -= int(permits)
                if missing <= 0:
                    return max(1.0, cool_at - now)
        return 1.0 if self.kind == "concurrency" else 60.0


@dataclass(slots=True)
class Permit:
    """One admitted request's reservation; `Limiter.settle` ends it."""

    key: Key
    tokens: int
    shares: list[Share]
    windows: dict[str, float]
    """Quota kind → the window that its tokens count in."""
    taken_at: float
    entries: dict[str, list[float]]
    """tpm → its entry in the cooling list, refunded if fewer tokens were used."""
    settled: bool = False


class Limiter:
    def __init__(self, store: Store, executor: Executor, clock: Callable[[], float] = time.time):
        self.store, self.executor, self.clock = store, executor, clock
        self.process_id = ""
        self.fence = 0.0
        """Admissions end at this time unless the lease is renewed before."""
        self.shares: dict[str, dict[str, Share]] = {}
        self.refills: dict[str, asyncio.Task[None]] = {}
        self.on_lease_lost: Callable[[], None] = lambda: None

    # ---------------------------------------------------------------- admission

    async def admit(self, key: Key, tokens: int) -> Permit:
        """Reserves one request of about `tokens` tokens. Raises Refused or Unavailable."""
        permit = self.try_admit(key, tokens)
        if permit is None:
            permit = await self._admit_slowly(key, tokens)
        return permit

    def try_admit(self, key: Key, tokens: int) -> Permit | None:
        """The fast path: None if this process's own permits don't suffice."""
        if not key.limits:
            return Permit(key, tokens, [], {}, 0.0, {})
        now = self.clock()
        if now >= self.fence or self._short(key, tokens, now):
            return None
        shares = self.shares[key.id]
        permit = Permit(key, tokens, [], {}, now, {})
        for kind, _ in key.limits:
            share = shares[kind]
            permit.shares.append(share)
            if kind == "concurrency":
                share.busy += 1
            elif kind == "rpm" or kind == "tpm":
                entry = [now + pools.COOLDOWN_S, 1 if kind == "rpm" else tokens]
                if share.cooling is None:
                    share.cooling = deque()
                share.cooling.append(entry)
                share.cooling_sum += int(entry[1])
                if kind == "tpm":
                    permit.entries[kind] = entry
            else:
                share.busy += tokens
                permit.windows[kind] = share.window_start
        return permit

    def _short(self, key: Key, tokens: int, now: float) -> list[pools.Need]:
        """The limits for which this process holds too few idle permits."""
        shares = self.shares.get(key.id)
        if shares is None:
            shares = self.shares[key.id] = {}
        needs = []
        for kind, capacity in key.limits:
            share = shares.get(kind)
            if share is None:
                share = shares[kind] = Share(kind, capacity)
            if share.capacity != capacity:
                share.over = share.over or capacity < share.capacity
                share.capacity = capacity
            need = tokens if kind not in ("rpm", "concurrency") else 1
            idle = share.idle(now)
            if share.over:
                needs.append(pools.Need(kind, capacity, need, surplus=max(0, idle)))
            elif idle < need:
                needs.append(pools.Need(kind, capacity, need - max(0, idle)))
        return needs

    async def _admit_slowly(self, key: Key, tokens: int) -> Permit:
        give_up = time.monotonic() + RECALL_S
        while True:
            now = self.clock()
            shares = self.shares.get(key.id, {})
            for need in self._short(key, tokens, now):
                share = shares[need.kind] if shares else self.shares[key.id][need.kind]
                whole = share.amount >= share.capacity and not share.over
                if whole or now < share.refused_until or need.amount > share.capacity:
                    raise self._refusal(share, tokens, now)
            await self._refill(key, tokens)
            permit = self.try_admit(key, tokens)
            if permit is not None:
                return permit
            now = self.clock()
            if now >= self.fence:
                raise Unavailable
            short = [self.shares[key.id][need.kind] for need in self._short(key, tokens, now)]
            hopeless = [share for share in short if not share.elsewhere]
            if hopeless or (short and time.monotonic() >= give_up):
                share = (hopeless or short)[0]
                share.refused_until = now + REFUSE_AGAIN_S
                raise self._refusal(share, tokens, now)
            if short:
                await asyncio.sleep(TICK_S / 2)

    def _refusal(self, share: Share, tokens: int, now: float) -> Refused:
        needed = 1 if share.kind in ("rpm", "concurrency") else tokens
        return Refused(share.kind, share.capacity, share.retry_after(now, needed), needed)

    async def _refill(self, key: Key, tokens: int) -> None:
        """Asks the store for what is missing; requests of one key that wait at the same time ask once."""
        task = self.refills.get(key.id)
        if task is None:
            task = self.refills[key.id] = asyncio.create_task(self._acquire(key, tokens))
            task.add_done_callback(lambda _: self.refills.pop(key.id, None))
        await asyncio.shield(task)

    async def _acquire(self, key: Key, tokens: int) -> None:
        needs = self._short(key, tokens, self.clock())
        shares = self.shares[key.id]
        for need in needs:
            shares[need.kind].amount -= need.surplus
        if not needs:
            return
        process_id = self.process_id
        loop = asyncio.get_running_loop()
        try:
            grants = await loop.run_in_executor(
                self.executor, pools.acquire, self.store, process_id, key.id, needs
            )
        except pools.LeaseLost:
            if process_id == self.process_id:
                self.on_lease_lost()
            raise Unavailable from None
        if process_id != self.process_id:
            return  # the lease changed hands meanwhile, and the permits with it
        for kind, grant in grants.items():
            share = shares[kind]
            if grant.window_start != share.window_start:
                share.amount = share.busy = share.spent = 0
            share.window_start, share.window_end = grant.window_start, grant.window_end
            share.amount += grant.amount
            share.elsewhere = grant.held_elsewhere
            share.over = grant.available < 0

    # ---------------------------------------------------------------- the end of a request

    def settle(self, permit: Permit, tokens: int) -> None:
        """Ends a reservation with the tokens that were really used; idempotent."""
        if permit.settled or not permit.shares:
            return
        permit.settled = True
        now = self.clock()
        for share in permit.shares:
            if self.shares.get(permit.key.id, {}).get(share.kind) is not share:
                continue  # dropped with a lost lease
            if share.kind == "concurrency":
                share.busy -= 1
            elif share.kind == "tpm":
                entry = permit.entries["tpm"]
                if tokens > permit.tokens:
                    # What was used beyond the reservation counts from now.
                    share.cooling.append([now + pools.COOLDOWN_S, tokens - permit.tokens])  # type: ignore[union-attr]
                    share.cooling_sum += tokens - permit.tokens
                elif entry[0] > now:  # else it has left the list, or is about to
                    share.cooling_sum -= int(entry[1]) - tokens
                    entry[1] = tokens
            elif share.kind != "rpm" and share.window_start == permit.windows[share.kind]:
                share.busy -= permit.tokens
                share.spent += tokens

    def ledgered(self, spent: Mapping[tuple[str, str, float], int]) -> None:
        """The ledger holds these tokens now ((key id, kind, window) → tokens): their permits are gone for
        good.
        """
        for (key_id, kind, window_start), tokens in spent.items():
            share = self.shares.get(key_id, {}).get(kind)
            if share is not None and share.window_start == window_start:
                share.spent -= tokens
                share.amount = max(0, share.amount - tokens)

    def remaining(self, key: Key) -> dict[str, tuple[int, int, float]]:
        """Kind → (limit, permits idle here, seconds until all of them are idle), for the x-ratelimit
        headers.
        """
        now = self.clock()
        shares = self.shares.get(key.id, {})
        answer = {}
        for kind, capacity in key.limits:
            share = shares.get(kind) if kind in ("rpm", "tpm") else None
            if share is not None:
                reset = share.cooling[-1][0] - now if share.idle(now) < capacity and share.cooling else 0.0
                answer[kind] = (capacity, max(0, share.idle(now)), max(0.0, reset))
        return answer

    # ---------------------------------------------------------------- the background

    def idle_amounts(self, which: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
        """Takes the idle permits of these pools out of the shares, to be given back."""
        now = self.clock()
        amounts = {}
        for key_id, kind in which:
            share = self.shares.get(key_id, {}).get(kind)
            if share is not None and key_id not in self.refills and (idle := share.idle(now)) > 0:
                share.amount -= idle
                amounts[key_id, kind] = idle
        return amounts

    async def tick(self) -> None:
        """Gives back what idles of pools that somebody found empty. Raises what the database raises."""
        loop = asyncio.get_running_loop()
        which = await loop.run_in_executor(self.executor, pools.wanted, self.store, self.process_id)
        over = [
            (key_id, share.kind)
            for key_id, kinds in self.shares.items()
            for share in kinds.values()
            if share.over
        ]
        amounts = self.idle_amounts(which + over)
        if amounts:
            await loop.run_in_executor(self.executor, pools.release, self.store, self.process_id, amounts)

    def forget(self) -> None:
        """After a lost lease: no permit is ours any more."""
        self.shares = {}
        self.fence = 0.0

    def cooling(self) -> dict[tuple[str, str], tuple[int, float]]:
        """What an orderly end leaves behind: permits that are not cool yet, and when the last of them is."""
        now = self.clock()
        left = {}
        for key_id, kinds in self.shares.items():
            for kind, share in kinds.items():
                share.idle(now)
                if share.cooling:
                    left[key_id, kind] = (share.cooling_sum, share.cooling[-1][0])
        return left
