"""The engine's loop over a real socket pair, in this process: order, backlog, snapshots, orphans."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from firsttoken.backends import wire
from firsttoken.backends.worker import BACKLOG_BYTES, Channel, Loop, ServerGone
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import Request, RequestOutput, SamplingParams

from .scripted_engine import HUGE, REFUSE, ScriptedEngine


class Server:
    """The other end: sends messages, and reads when told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = wire.FrameReader()

    def send(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            self.sock.sendall(wire.pack(message))

    def submit(self, request_id: str, start: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.send(wire.Submit(Request(request_id=request_id, prompt_token_ids=[start], sampling=sampling)))

    def read(self) -> list[wire.ToServer]:
        self.sock.setblocking(False)
        messages: list[wire.ToServer] = []
        try:
            while data := self.sock.recv(1 << 16):
                messages += map(wire.decode_to_server, self.frames.feed(data))
        except BlockingIOError:
            pass
        self.sock.setblocking(True)
        return messages


def outputs(messages: list[wire.ToServer]) -> list[RequestOutput]:
    return [output for message in messages if isinstance(message, wire.Step) for output in message.outputs]


def tokens(messages: list[wire.ToServer]) -> dict[str, list[int]]:
    made: dict[str, list[int]] = defaultdict(list)
    for output in outputs(messages):
        made[output.request_id] += output.token_ids
    return made


@pytest.fixture
def pair() -> Iterator[tuple[Loop, Channel, Server]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        yield Loop(ScriptedEngine(EngineConfig()), channel), channel, Server(ours)


Pair = tuple[Loop, Channel, Server]


def test_all_arrivals_are_taken_before_a_step(pair: Pair) -> None:
    loop, _, server = pair
    for i in range(50):
        server.submit(f"r{i}", 100 * i, 2)
    loop.turn()
    assert [output.request_id for output in outputs(server.read())] == [f"r{i}" for i in range(50)]


def test_an_abort_between_two_steps_is_seen_by_the_next(pair: Pair) -> None:
    loop, _, server = pair
    server.submit("a", 0, 10)
    server.submit("b", 100, 10)
    loop.turn()
    server.send(wire.Abort("a"))
    loop.turn()
    assert tokens(server.read()) == {"a": [0], "b": [100, 101]}


def test_whoever_sees_a_stream_end_finds_it_in_the_counters(pair: Pair) -> None:
    loop, _, server = pair
    server.submit("a", 0, 1)
    loop.turn()
    ending = next(
        m for m in server.read() if isinstance(m, wire.Step) and outputs([m]) and m.outputs[0].finished
    )
    assert ending.stats is not None
    assert ending.stats.finished == {"length": 1}
    assert ending.stats.cpu_seconds > 0


def test_going_idle_by_an_abort_is_reported_at_once(pair: Pair) -> None:
    loop, _, server = pair
    server.submit("a", 0, 10)
    loop.turn()
    server.read()
    server.send(wire.Abort("a"))
    loop.turn()
    (step,) = server.read()
    assert isinstance(step, wire.Step)
    assert step.stats is not None
    assert step.stats.num_running == 0


def test_an_idle_engine_gives_signs_of_life(pair: Pair) -> None:
    loop, _, server = pair
    loop.turn()
    server.read()
    loop.turn()  # nothing has arrived: this one waits
    (step,) = server.read()
    assert isinstance(step, wire.Step)
    assert step.stats is not None


def test_a_server_that_does_not_read_costs_bounded_memory_and_no_token(pair: Pair) -> None:
    loop, channel, server = pair
    count, length = 40, 1500
    for i in range(count):
        server.submit(f"r{i}", i * 10_000, length)
    largest = 0
    for _ in range(length):  # every request ends while nobody reads
        loop.turn()
        largest = max(largest, channel.backlog)
    one_step = count * 500
    assert BACKLOG_BYTES < largest < BACKLOG_BYTES + one_step
    messages = []
    finished = 0
    while finished < count:
        new = server.read()
        finished += sum(output.finished for output in outputs(new))
        messages += new
        loop.turn()
    assert tokens(messages) == {f"r{i}": list(range(i * 10_000, i * 10_000 + length)) for i in range(count)}


def test_a_refused_request_and_an_unsendable_output_end_alone(pair: Pair) -> None:
    loop, _, server = pair
    server.submit("refused", REFUSE, 3)
    server.submit("huge", HUGE, 3)
    server.submit("good", 5, 3)
    for _ in range(3):
        loop.turn()
    messages = server.read()
    assert tokens(messages)["good"] == [5, 6, 7]
    errors = {
        output.request_id: output.error for output in outputs(messages) if output.finish_reason == "error"
    }
    assert errors["refused"] == "the prompt is refused"
    assert "cannot be sent" in (errors["huge"] or "")


def test_a_server_that_is_gone_ends_the_loop(pair: Pair) -> None:
    loop, _, server = pair
    server.submit("a", 0, 1000)
    loop.turn()
    server.sock.close()
    with pytest.raises(ServerGone):
        loop.run()


def test_an_orphan_ends_where_the_system_does_not_tell_it() -> None:
    """The net for systems without PR_SET_PDEATHSIG: a child that looks for its parent."""
    child = "import sys; from firsttoken.backends.worker import watch_parent; watch_parent(int(sys.argv[1]), 0.05)"
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())], stdout=sys.stdout)\n"
        "print(child.pid, flush=True); os._exit(0)"
    )
    # The grandchild holds the pipe: communicate() returns when it is gone, and raises if it stays.
    run = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, timeout=60, check=True)
    assert int(run.stdout) > 0


def test_the_worker_module_imports_no_torch() -> None:
    code = (
        "import firsttoken.backends.embedded, firsttoken.backends.worker, sys; print('torch' in sys.modules, "
        "'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_short_wait_ends_when_a_message_arrives(pair: Pair) -> None:
    _, channel, server = pair
    server.send(wire.Abort("x"))
    began = time.monotonic()
    assert channel.receive(60.0) == [wire.Abort("x")]
    assert time.monotonic() - began < 30.0  # it did not sit out its 60 s
