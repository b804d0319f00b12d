"""One run of the engine's process, seen from the server: start, messages, silence, death. No torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec

from firsttoken.backends.base import BackendError, BackendInfo
from firsttoken.backends.wire import (
    Call,
    Failed,
    FrameReader,
    Progress,
    Ready,
    Reply,
    Start,
    Step,
    ToEngine,
    WireError,
    decode_to_server,
    pack,
)
from firsttoken.engine.config import ConfigError, EngineConfig

EXIT_GRACE_S = 0.5
"""Time that the process has to end by itself once its socket is closed; then it is killed."""


def available_cores() -> int:
    """Cores that this process may run on (a container or taskset may give it fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """The engine's environment. OpenMP reads it once, when torch is imported, so it is set from outside.

    A step is hundreds of short parallel regions, and server and client share the cores with the engine. So
    threads spin for about as long as the gap between two regions and sleep between two steps: sleeping at
    once made cold first tokens later, and spinning for longer gained nothing. What the user has set wins.
    """
    return {
        "OMP_NUM_THREADS": str(config.num_threads or available_cores()),
        "GOMP_SPINCOUNT": "10000",  # GNU (torch on Linux): turns of the waiting loop, about 0.1 ms
        "KMP_BLOCKTIME": "1",  # LLVM and Intel (torch on macOS): milliseconds, the smallest that is not sleep
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }


class EngineProcess(asyncio.Protocol):
    """Starts the process and speaks with it. One object per run; a restart makes a new one.

    `ended` is done when the process is gone and reaped; its result is one line that says why.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str,
        hang_timeout_s: float,
        on_step: Callable[[Step], None],
        on_progress: Callable[[str, float], None] | None,
    ) -> None:
        self._config = config
        self._factory = factory
        self._hang_timeout_s = hang_timeout_s
        self._on_step = on_step
        self._on_progress = on_progress
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._ready: asyncio.Future[BackendInfo] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._failure: Failed | None = None
        self._verdict: str | None = None
        """Why this side ended the process, if it did."""
        self._log = _Log()
        self._silent_s = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._reaper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Warm, and connected: what is sent now will be read."""
        return self._transport is not None and self._ready.done() and self._reaper is None

    # -- start -----------------------------------------------------------------------------------------------

    async def start(self) -> BackendInfo:
        """Returns when the engine is warm. Raises ConfigError or BackendError; the process is then gone."""
        try:
            await self._spawn()
            await asyncio.wait((self._ready, self.ended), return_when=asyncio.FIRST_COMPLETED)
        except OSError as error:  # no memory, no file descriptor, no process left
            self._verdict = f"the engine process could not be started: {error}"
            await self.stop()
            raise BackendError(self._verdict) from error
        except BaseException:
            await self.stop()
            raise
        if not self._ready.done():
            if self._failure is not None and self._failure.is_config:
                raise ConfigError(self._failure.message)
            raise BackendError(f"the engine did not start: {self.ended.result()}")
        self._watch()
        return self._ready.result()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        spawned_at = time.monotonic()
        try:
            with theirs:
                # Blocks the loop for a few milliseconds. -P: no module of the working directory is imported.
                self._process = subprocess.Popen(  # noqa: ASYNC220
                    [
                        *(sys.executable, "-P", "-m", "firsttoken.backends.worker"),
                        *(str(theirs.fileno()), str(os.getpid()), self._factory),
                    ],
                    env=engine_environment(self._config),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # not the terminal's foreground group: Ctrl-C is the server's to handle
                )
            await self._loop.connect_read_pipe(lambda: self._log, self._process.stdout)
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        self.send(Start(self._config, spawned_at))

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, message: ToEngine) -> None:
        """Raises WireError if the message has no form on the wire. Does nothing if the process is gone."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    async def call(self, method: str, *arguments: Any) -> Any:
        """The engine's answer, between two of its steps. Raises ConfigError or BackendError."""
        if not self.alive:
            raise BackendError("the engine is not running")
        reply = self._loop.create_future()
        id = max(self._calls, default=0) + 1
        self._calls[id] = reply
        try:
            self.send(Call(id, method, list(arguments)))
            return await reply
        finally:
            self._calls.pop(id, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        # Streams are woken from here directly: a token costs its reader one turn of the event loop.
        self._silent_s = 0.0
        try:
            for payload in self._frames.feed(data):
                message = decode_to_server(payload)
                match message:
                    case Step():
                        self._on_step(message)
                    case Progress(stage, seconds):
                        if self._on_progress is not None:
                            self._on_progress(stage, seconds)
                    case Reply(id, result, error):
                        if (reply := self._calls.get(id)) is not None and not reply.done():
                            if error is None:
                                reply.set_result(result)
                            else:
                                reply.set_exception(ConfigError(error))
                    case Ready(info):
                        self._ready.set_result(msgspec.convert(info, BackendInfo))
                    case Failed():
                        self._failure = message
        except (WireError, msgspec.ValidationError) as error:
            self._verdict = f"the engine process sent nonsense: {error}"
            self._kill(signal.SIGKILL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._begin_end()

    # -- silence ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """An engine says something after every step, and every second when idle: silence means that it hangs.

        Silence is counted in ticks of this loop, so that a server that was itself stopped accuses nobody.
        """
        tick = min(1.0, self._hang_timeout_s / 4)

        def look() -> None:
            self._silent_s += tick
            if self._silent_s <= self._hang_timeout_s:
                self._watchdog = self._loop.call_later(tick, look)
                return
            self._verdict = f"the engine made no step for {self._hang_timeout_s:g} s and was ended"
            self._kill(signal.SIGUSR1)  # the worker's faulthandler writes to the log where it hangs
            self._begin_end()

        self._watchdog = self._loop.call_later(tick, look)

    # -- end -------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Ends the process and waits for it, within a second. Idempotent."""
        self._verdict = self._verdict or "the engine was closed"
        self._begin_end()
        await asyncio.shield(self.ended)

    def _begin_end(self) -> None:
        if self._reaper is None:
            self._reaper = self._loop.create_task(self._end())

    async def _end(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            self._transport.abort()  # the worker ends when its socket does
        try:
            if self._process is not None:
                await self._reap(self._process)
        finally:
            reason = self._reason()
            for reply in self._calls.values():
                if not reply.done():
                    reply.set_exception(BackendError(reason))
            self.ended.set_result(reason)

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the exit, with a limit, and takes the last of the log."""
        deadline = time.monotonic() + EXIT_GRACE_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                self._kill(signal.SIGKILL)
            await asyncio.sleep(0.005)
        await self._log.close()

    def _kill(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # does nothing once the process is reaped

    def _reason(self) -> str:
        if self._verdict is not None:
            return self._verdict
        if self._process is None:
            return "the engine process was not started"
        code = self._process.returncode
        if code < 0:
            with suppress(ValueError):
                return self._with_last_line(f"the engine process was killed by {signal.Signals(-code).name}")
        if self._failure is not None:
            return f"the engine process failed (exit code {code}): {self._failure.message}"
        return self._with_last_line(f"the engine process ended with exit code {code}")

    def _with_last_line(self, reason: str) -> str:
        return f"{reason}: {last:.300}" if (last := self._log.last_line()) else reason


class _Log(asyncio.Protocol):
    """What the process prints: passed on to our stderr; its end is kept for the reason of a death."""

    def __init__(self) -> None:
        self._tail = ""
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        self._tail = (self._tail + text)[-4096:]
        with suppress(OSError, ValueError):  # a closed stderr of ours is no reason to lose the engine
            sys.stderr.write(text)
            sys.stderr.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(None)

    async def close(self) -> None:
        """Takes what is left, once the process is gone, and gives the pipe back."""
        if self._transport is not None:
            await asyncio.wait((self._ended,), timeout=0.2)  # a child of the process may hold the pipe open
            self._transport.close()
            await self._ended

    def last_line(self) -> str:
        lines = [line.strip() for line in self._tail.splitlines() if line.strip()]
        return lines[-1] if lines else ""
