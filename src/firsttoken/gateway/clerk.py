"""The background of one gateway process: its lease, its journal's way into the store, and what others changed.

Everything that touches the database runs in one thread of its own, so that reservations and settlements keep
their order; nothing of it runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from firsttoken.gateway import ledger, pools
from firsttoken.gateway.auth import REFRESH_S, KeyRing
from firsttoken.gateway.journal import ROTATE_BYTES, Journal, Record
from firsttoken.gateway.limits import TICK_S, Limiter
from firsttoken.gateway.store import Store

log = logging.getLogger("firsttoken.gateway")
T = TypeVar("T")

LEASE_S = 30.0
HEARTBEAT_S = 3.0
FENCE_MARGIN_S = 2.0
"""A process stops admitting this long before its lease ends, whatever the clocks do."""
INGEST_S = 0.25
MAX_PENDING = 50_000
"""Records kept in memory while the store can't be reached; beyond, they are read back from the journal."""
PRUNE_EVERY_S = 600.0


class Clerk:
    """Start it before the first request, stop it after the last."""

    def __init__(self, store: Store, folder: Path, keep_requests_s: float, keep_minutes_s: float):
        self.store, self.folder = store, folder
        self.keep_requests_s, self.keep_minutes_s = keep_requests_s, keep_minutes_s
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="store")
        self.clock_offset = time.time() - time.monotonic()
        self.keys = KeyRing(store, self.executor)
        self.limiter = Limiter(store, self.executor, self.clock)
        self.limiter.on_lease_lost = self._lease_lost
        self.on_lease_lost: Callable[[], None] = lambda: None
        self.on_settings: Callable[[], None] = lambda: None
        self.alive = 1
        self.pending: list[Record] = []
        self.replay = False
        self.tasks: list[asyncio.Task[None]] = []
        self.lost = asyncio.Event()
        self.store_ok = True

    def clock(self) -> float:
        """Seconds since the epoch by the store's clock, immune to steps of this host's."""
        return time.monotonic() + self.clock_offset

    def record(self, record: Record) -> None:
        """Journals a record now (it survives kill -9) and stores it soon. Raises OSError if it can't be
        written.
        """
        self.journal.append(record)
        if not self.replay:
            self.pending.append(copy.copy(record))  # the original changes while a thread stores this one
            if len(self.pending) > MAX_PENDING:
                self.pending.clear()
                self.replay = True

    # ---------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Takes a lease, buries this host's dead processes and loads the keys."""
        await self._begin()
        await self._run(ledger.bury_orphans, self.store, self.folder, self.process_id)
        await self.keys.refresh()
        loops: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (HEARTBEAT_S, self._heartbeat),
            (INGEST_S, self.ingest),
            (REFRESH_S, self._refresh),
            (TICK_S, self._tick),
            (1.0, self._bury),
            (PRUNE_EVERY_S, self._prune),
        ]
        self.tasks = [asyncio.create_task(self._every(interval, work)) for interval, work in loops]

    async def stop(self) -> None:
        """Stores what is pending and gives the lease back."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        stored = False
        with contextlib.suppress(Exception):
            while self.pending or self.replay:
                await self.ingest()
            await self._run(pools.leave, self.store, self.process_id, self.limiter.cooling())
            stored = True
        if not stored:
            log.warning(
                "the store could not be reached: the journal in %s is taken in at the next start", self.folder
            )
        self.journal.close(delete=stored)
        self.executor.shutdown()

    async def _begin(self) -> None:
        process_id = f"{int(time.time()):x}-{secrets.token_hex(6)}"
        now = await self._run(
            ledger.register, self.store, process_id, socket.gethostname(), os.getpid(), LEASE_S
        )
        self.journal = Journal(self.folder, process_id)
        self.process_id = self.limiter.process_id = process_id
        self._renewed(now)

    def _renewed(self, now: float) -> None:
        self.clock_offset = now - time.monotonic()
        self.limiter.fence = now + LEASE_S - FENCE_MARGIN_S

    # ---------------------------------------------------------------- the loops

    async def _every(self, interval: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval)
            try:
                await work()
                self.store_ok = True
            except pools.LeaseLost:
                self._lease_lost()
            except Exception as error:  # the database may be away for a while; nothing here may end the loop
                if self.store_ok:
                    log.warning("the store: %s", str(error).splitlines()[0])
                self.store_ok = False

    async def _heartbeat(self) -> None:
        if self.lost.is_set():
            with contextlib.suppress(OSError):
                await self.ingest()
                self.journal.close(delete=True)
            await self._begin()
            self.lost.clear()
            return
        started = time.monotonic()
        now = await self._run(ledger.renew, self.store, self.process_id, LEASE_S)
        self._renewed(now)
        # The lease was renewed at some moment after `started`: count from the earliest possible one.
        self.limiter.fence -= time.monotonic() - started
        self.alive = await self._run(ledger.alive, self.store)

    def _lease_lost(self) -> None:
        """Others may use this process's permits now: what runs on them is ended, then a new lease is taken."""
        if not self.lost.is_set():
            log.error(
                "this process's lease expired (was it stopped for %.0f s?): its requests are ended", LEASE_S
            )
            self.lost.set()
            self.limiter.forget()
            self.on_lease_lost()

    async def ingest(self) -> None:
        """Moves what is pending into the store."""
        if self.replay:
            self.replay = False
            self.pending = list(self.journal.replay())
        batch, self.pending = self.pending, []
        if self.journal.size > ROTATE_BYTES:
            self.journal.rotate()
        old = list(self.journal.old)
        if not batch:
            self.journal.forget_old(old)
            return
        try:
            spent = await self._run(ledger.ingest, self.store, batch)
        except BaseException:
            self.pending = batch + self.pending
            if len(self.pending) > MAX_PENDING:
                self.pending, self.replay = [], True
            raise
        self.limiter.ledgered(spent)
        self.journal.forget_old(old)

    async def _refresh(self) -> None:
        if await self.keys.refresh():
            self.on_settings()

    async def _tick(self) -> None:
        if self.alive > 1 or any(
            share.over for kinds in self.limiter.shares.values() for share in kinds.values()
        ):
            await self.limiter.tick()

    async def _bury(self) -> None:
        for process_id in await self._run(ledger.bury_orphans, self.store, self.folder, self.process_id):
            log.warning("process %s died: its requests are accounted for, its permits freed", process_id)
        for process_id in await self._run(ledger.expired, self.store):
            if process_id == self.process_id:
                raise pools.LeaseLost(process_id)
            await self._run(ledger.reap, self.store, process_id)
            log.warning(
                "the lease of process %s expired: its requests are aborted, its permits freed", process_id
            )

    async def _prune(self) -> None:
        await self._run(ledger.prune, self.store, self.keep_requests_s, self.keep_minutes_s)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *args)
