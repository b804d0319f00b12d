"""The engine's own process: `python -m firsttoken.backends.worker FD PARENT_PID FACTORY`, see process.py.

One thread does everything: take all arrivals, make a step, send its outputs, repeat. Nothing here waits for
the server: what the socket does not take is kept, and over a bound merged per request, so that a slow or
stopped server costs bounded memory and never a step. The process ends when the socket does; SIGINT and
SIGTERM, which terminals and service managers send to whole groups, are the server's to handle: it still has
streams to drain.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from firsttoken.backends.base import EngineStats
from firsttoken.backends.wire import (
    Abort,
    Call,
    Failed,
    FrameReader,
    Progress,
    Ready,
    Reply,
    Start,
    Step,
    Submit,
    ToEngine,
    ToServer,
    WireError,
    decode_to_engine,
    merge_output,
    pack,
)
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.request import Request, RequestOutput

CALLS = ("reset_prefix_cache", "reconfigure")
"""Methods of the engine that the server may call between steps."""

SNAPSHOT_S = 0.05
"""Least time between two snapshots of the counters while the engine works."""
IDLE_S = 1.0
"""Most time between two snapshots; their absence is how the server notices a hung engine."""
BACKLOG_BYTES = 1 << 20
"""Unsent bytes above which outputs are merged per request instead of queued."""


class ServedEngine(Protocol):
    """What the loop needs of `firsttoken.engine.engine.Engine`, which keeps no outputs it has handed over."""

    def warmup(self) -> None: ...
    def info(self) -> dict[str, Any]: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self, on_outputs: Callable[[list[RequestOutput]], None]) -> list[RequestOutput]:
        """Hands each output to `on_outputs`, before any work of the step that the output need not wait for."""
        ...

    def stats(self) -> dict[str, Any]: ...
    def reset_prefix_cache(self) -> bool: ...
    def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]: ...


class ServerGone(Exception):
    """The other end of the socket is closed: the process has nobody to work for."""


class Channel:
    """The socket to the server: non-blocking both ways, with a buffer of what it has not taken yet.

    `receive`, `send` and `flush` raise ServerGone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._poll = select.poll()
        self._events = select.POLLIN
        self._poll.register(sock, self._events)

    @property
    def backlog(self) -> int:
        """Bytes that wait for the server to read."""
        return len(self._unsent)

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that have arrived; waits at most `timeout` seconds for one, or for room to send."""
        messages: list[ToEngine] = []
        for _, event in self._poll.poll(timeout * 1000):
            if event & select.POLLOUT:
                self.flush()
            if event & ~select.POLLOUT:
                while data := self._read():
                    messages.extend(map(decode_to_engine, self._reader.feed(data)))
        return messages

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ServerGone from error
        if not data:
            raise ServerGone
        return data

    def send(self, message: ToServer) -> None:
        """Raises WireError if the message is too large; it is then not sent at all."""
        self._unsent += pack(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                break
            except OSError as error:
                raise ServerGone from error
            del self._unsent[:sent]
        events = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
        if events != self._events:
            self._events = events
            self._poll.modify(self._sock, events)

    def send_last(self, message: ToServer, timeout: float = 1.0) -> None:
        """Before the process ends: sends all that waits and `message`, or raises OSError in `timeout` s."""
        self._sock.settimeout(timeout)
        self._sock.sendall(self._unsent + pack(message))


class Loop:
    """Runs an engine for the server at the other end of a channel."""

    def __init__(self, engine: ServedEngine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._held: dict[str, RequestOutput] = {}
        """Outputs that wait for the backlog to shrink, merged by request."""
        self._snapshot_at = 0.0
        self._changed = False
        """Whether anything has happened since the last snapshot."""

    def run(self) -> NoReturn:
        """Until ServerGone, or an exception of the engine that no request is to blame for."""
        while True:
            self.turn()

    def turn(self) -> None:
        """All arrivals, then one step. Waits only if there is nothing to do, and for IDLE_S at most."""
        engine = self._engine
        for message in self._channel.receive(0.0 if engine.has_work() else IDLE_S):
            self._handle(message)
            self._changed = True
        if engine.has_work():
            self._changed = True
            engine.step(self.emit)
        elif self._held:
            self.emit([])
        self._snapshot_if_due()

    def emit(self, outputs: list[RequestOutput]) -> None:
        """Sends outputs now, or holds them if the server is far behind.

        A message that ends a request carries a snapshot, so that whoever has seen a stream end finds it in
        the counters; other snapshots are taken after the outputs are on their way.
        """
        channel = self._channel
        channel.flush()
        if channel.backlog > BACKLOG_BYTES or self._held:
            for output in outputs:
                if (held := self._held.get(output.request_id)) is None:
                    self._held[output.request_id] = output
                else:
                    merge_output(held, output)
            if channel.backlog > BACKLOG_BYTES:
                return
            outputs, self._held = list(self._held.values()), {}
        if not outputs:
            return
        stats = self._snapshot() if any(output.finished for output in outputs) else None
        try:
            channel.send(Step(outputs, stats))
        except WireError:
            self._send_singly(outputs)

    def _send_singly(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            try:
                self._channel.send(Step([output]))
            except WireError as error:  # only prompt_logprobs of a huge prompt get here
                self._engine.abort(output.request_id)
                self._channel.send(Step([_failed(output.request_id, str(error))]))

    def _snapshot(self) -> EngineStats:
        self._snapshot_at, self._changed = time.monotonic(), False
        return snapshot(self._engine)

    def _snapshot_if_due(self) -> None:
        if self._channel.backlog:
            return  # a server that is behind needs no snapshots: the next one says all that these would
        age = time.monotonic() - self._snapshot_at
        if age >= SNAPSHOT_S if self._engine.has_work() else self._changed or age >= IDLE_S:
            self._channel.send(Step([], self._snapshot()))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                try:
                    self._engine.add_request(request)
                except ValueError as error:
                    self.emit([_failed(request.request_id, str(error))])
            case Abort(request_id):
                self._engine.abort(request_id)
                self._held.pop(request_id, None)
            case Call(id, method, arguments) if method in CALLS:
                try:
                    reply = Reply(id, getattr(self._engine, method)(*arguments))
                except ConfigError as error:
                    reply = Reply(id, error=str(error))
                self._channel.send(reply)
            case _:
                raise WireError(f"unexpected message {message!r:.200}")


def snapshot(engine: ServedEngine) -> EngineStats:
    return msgspec.convert({**engine.stats(), "cpu_seconds": time.process_time()}, EngineStats)


def _failed(request_id: str, error: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=error)


def load(channel: Channel, factory: str) -> ServedEngine:
    """Waits for Start, then makes a warm engine and says so. Raises ConfigError, ServerGone."""
    messages: list[ToEngine] = []
    while not messages:
        messages = channel.receive(IDLE_S)
    (start,) = messages
    if not isinstance(start, Start):
        raise WireError(f"expected Start, got {start!r:.200}")
    seconds: dict[str, float] = {}
    began = start.spawned_at

    def stage_done(stage: str) -> None:
        nonlocal began
        now = time.monotonic()
        seconds[stage], began = now - began, now
        channel.send(Progress(stage, seconds[stage]))

    stage_done("spawn")
    module, _, name = factory.partition(":")
    make_engine: Callable[[EngineConfig], ServedEngine] = getattr(importlib.import_module(module), name)
    stage_done("import")
    engine = make_engine(start.config)
    stage_done("load")
    engine.warmup()
    # What has been made by now lives as long as the process: spare the collector from walking it mid-stream.
    gc.collect()
    gc.freeze()
    stage_done("warmup")
    info = engine.info()
    channel.send(Step([], snapshot(engine)))  # whoever is told that it is ready may ask for its numbers
    channel.send(Ready({**info, "startup": seconds}))
    return engine


def die_with(parent_pid: int) -> None:
    """Ends this process when its parent dies, whatever it is doing: loading, or stuck in a step.

    In the loop the end of the socket does the same sooner. Linux signals the death; elsewhere a thread looks.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call
            os._exit(1)
    else:
        threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True).start()


def watch_parent(parent_pid: int, interval: float = 1.0) -> NoReturn:
    """Looks for the parent every `interval` seconds; ends this process when it is another one."""
    while os.getppid() == parent_pid:
        time.sleep(interval)
    os._exit(1)


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # a look at an engine that hangs; process.py asks for it
    fd, parent_pid, factory = sys.argv[1:]
    die_with(int(parent_pid))
    channel = Channel(socket.socket(fileno=int(fd)))
    code = 1
    try:
        Loop(load(channel, factory), channel).run()
    except ServerGone:
        code = 0
    except ConfigError as error:
        code = 2
        _say_last(channel, Failed(str(error), is_config=True))
    except BaseException as error:
        traceback.print_exc()
        _say_last(channel, Failed(" ".join(f"{type(error).__name__}: {error}".split())))
    # No interpreter shutdown: destructors of a torch process take long, and there is nothing left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_last(channel: Channel, message: Failed) -> None:
    try:
        channel.send_last(message)
    except OSError:
        print(message.message, file=sys.stderr)  # nobody listens; the log has it at least


if __name__ == "__main__":
    main()
