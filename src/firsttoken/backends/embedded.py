"""The engine in a process of its own, as a Backend: one stream per request, restarts, counters. No torch."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import zip_longest
from typing import Any

from firsttoken.backends.base import BackendError, BackendInfo, EngineStats
from firsttoken.backends.process import EngineProcess
from firsttoken.backends.wire import Abort, Step, Submit, merge_output
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import Request, RequestOutput

log = logging.getLogger("firsttoken.backends")

ENGINE = "firsttoken.backends.factory:create_engine"
"""What the engine process makes of an EngineConfig, as module:name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When the engine has died: try again, first after `backoff_s`, each next time after twice as long.

    The death after `max_restarts` restarts within `window_s` is final.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    backoff_s: float = 0.5


class _Stream:
    """What the engine has made for one request and its reader has not taken yet.

    That is at most one output: a reader that is late finds the outputs of several steps merged into one.
    """

    __slots__ = ("_error", "_pending", "_waiter", "finished", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.finished = False
        """Nothing more will come from the engine."""
        self._pending: RequestOutput | None = None
        self._error: BackendError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        output.request_id = self.request_id
        if self._pending is None:
            self._pending = output
        else:
            merge_output(self._pending, output)
        self.finished = output.finished
        self._wake()

    def fail(self, reason: str) -> None:
        """What has arrived is still delivered; then the reader gets a BackendError."""
        self._error = BackendError(reason)
        self.finished = True
        self._wake()

    async def get(self) -> RequestOutput:
        if self._pending is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._pending is not None:
            output, self._pending = self._pending, None
            return output
        assert self._error is not None
        raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EmbeddedBackend:
    """Runs `firsttoken.engine` in a process of its own, and starts it again when it dies.

    `on_progress(stage, seconds)` is called as each stage of a start ends; `on_fatal(reason)` once, when the
    engine has died too often: the server should then end with a non-zero code. `hang_timeout_s` bounds one
    step (the largest prefill on the slowest machine, with room): an engine silent for longer is killed.
    """

    info: BackendInfo

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[str, float], None] | None = None,
        on_fatal: Callable[[str], None] | None = None,
        restart: RestartPolicy | None = None,
        hang_timeout_s: float = 300.0,
        engine_factory: str = ENGINE,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._on_fatal = on_fatal
        self._restart = restart or RestartPolicy()
        self._hang_timeout_s = hang_timeout_s
        self._engine_factory = engine_factory
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, _Stream] = {}
        """By the id that the engine knows: unique for the life of this object, whatever ids clients send."""
        self._submitted = 0
        self._down_reason = "the engine has not been started"
        self._earlier = EngineStats()
        """Counters of the runs before this one."""
        self._stats = EngineStats()

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the engine is warm. Raises ConfigError or BackendError with one line."""
        await self._run_engine()
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Ends the engine and waits for it, within a second. Open streams get a BackendError. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
            self._supervisor = None
        if self._process is not None:
            await self._process.stop()
            self._engine_is_down("the engine was closed")

    @property
    def healthy(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """The engine's process id, for those who measure it."""
        return None if self._process is None else self._process.pid

    async def _run_engine(self) -> None:
        self._process = EngineProcess(
            self._config,
            factory=self._engine_factory,
            hang_timeout_s=self._hang_timeout_s,
            on_step=self._take_step,
            on_progress=self._on_progress,
        )
        self.info = await self._process.start()

    async def _supervise(self) -> None:
        """Waits for the engine to die and starts it again, until it has died too often."""
        restarts: deque[float] = deque()
        while True:
            assert self._process is not None
            reason = await asyncio.shield(self._process.ended)
            self._engine_is_down(reason)
            now = time.monotonic()
            while restarts and now - restarts[0] > self._restart.window_s:
                restarts.popleft()
            if len(restarts) == self._restart.max_restarts:
                log.critical("%s; it has been restarted %d times and stays down", reason, len(restarts))
                if self._on_fatal is not None:
                    self._on_fatal(reason)
                return
            delay = self._restart.backoff_s * 2 ** len(restarts)
            log.error("%s; restarting in %.1f s", reason, delay)
            await asyncio.sleep(delay)
            restarts.append(time.monotonic())
            try:
                await self._run_engine()
            except (BackendError, ValueError) as error:
                log.error("%s", error)  # the process has ended: the loop counts it as a death
            else:
                log.warning("the engine is up again")

    def _engine_is_down(self, reason: str) -> None:
        self._down_reason = reason
        self._earlier = self.stats()
        self._stats = EngineStats()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(reason)

    # -- requests --------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until one is `finished`; a late reader gets several steps' tokens in one.

        Closing the iterator early, or cancelling the task that waits on it, aborts the request. Raises
        BackendError if the engine is or goes down, WireError if the request cannot be sent.
        """
        process = self._process
        if process is None or not process.alive:
            raise BackendError(self._down_reason)
        self._submitted += 1
        engine_id = f"{request.request_id}#{self._submitted}"
        arrival = request.arrival_time or time.monotonic()
        process.send(Submit(dataclasses.replace(request, request_id=engine_id, arrival_time=arrival)))
        stream = self._streams[engine_id] = _Stream(request.request_id)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if self._streams.pop(engine_id, None) is not None and not stream.finished:
                process.send(Abort(engine_id))

    async def abort(self, request_id: str) -> None:
        """Ends all requests of this id: their streams get finish_reason "abort" at once."""
        for engine_id, stream in list(self._streams.items()):
            if stream.request_id == request_id and not stream.finished:
                del self._streams[engine_id]
                assert self._process is not None
                self._process.send(Abort(engine_id))
                stream.put(RequestOutput(request_id=request_id, finish_reason="abort"))

    def _take_step(self, step: Step) -> None:
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:  # else it was aborted a moment ago
                stream.put(output)
        if step.stats is not None:
            self._stats = step.stats

    # -- the engine as a whole -------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The newest snapshot. Counters go on where they were when the engine died; gauges do not."""
        return add_counters(self._stats, self._earlier)

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._call("reset_prefix_cache"))

    async def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = await self._call("reconfigure", changes)
        self._config = dataclasses.replace(self._config, **changes)  # a restart keeps them
        self.info = dataclasses.replace(self.info, settings=settings)
        return settings

    async def _call(self, method: str, *arguments: Any) -> Any:
        if not self.healthy:
            raise BackendError(self._down_reason)
        assert self._process is not None
        return await self._process.call(method, *arguments)


GAUGES = (
    "num_running",
    "num_waiting",
    "num_blocks_used",
    "num_blocks_pinned",
    "num_blocks_total",
    "speculation",
)


def add_counters(now: EngineStats, earlier: EngineStats) -> EngineStats:
    """`now` with the counters of `earlier` runs of the engine added; its gauges stay."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(EngineStats):
        if field.name in GAUGES:
            continue
        a, b = getattr(now, field.name), getattr(earlier, field.name)
        if isinstance(a, dict):
            changes[field.name] = {key: a.get(key, 0) + b.get(key, 0) for key in {**b, **a}}
        elif isinstance(a, list):
            changes[field.name] = [x + y for x, y in zip_longest(a, b, fillvalue=0)]
        else:
            changes[field.name] = a + b
    return dataclasses.replace(now, **changes)
