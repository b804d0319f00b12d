"""Answers → server-sent events: one write per engine step, the first token in the write of the headers."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from firsttoken.backends.base import BackendError
from firsttoken.server.errors import ApiError, unavailable
from firsttoken.server.generation import Answers, Choice, Delta
from firsttoken.server.http import Connection
from firsttoken.server.serving import Serving

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class Chunks(Protocol):
    """How one route writes its answers as events."""

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """The events of one delta; empty if it adds nothing that a client could see."""


class EventFrame:
    """The parts of a chunk that are the same in every one of a stream, encoded once.

    chunk = {"id", "object", "created", "model", "choices": [{"index", …}] [, "usage"]}
    """

    __slots__ = ("_answers", "_continuous", "_head", "_tail", "include_usage")

    def __init__(self, answers: Answers, head: dict[str, Any], include_usage: bool, continuous: bool) -> None:
        self._answers = answers
        self._head = b"data: " + encode(head)[:-1]
        # With include_usage every chunk but the last says "usage": null, as the API does.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._continuous = continuous
        self.include_usage = include_usage

    def event(self, index: int, rest: bytes, extra: bytes = b"") -> bytes:
        """One choice's chunk. `rest`: the JSON of its fields after index, from the comma; `extra`: of the chunk's."""
        tail = self._tail
        if self._continuous:
            tail = b'],"usage":%b}\n\n' % encode(self._answers.usage(final=False))
        return b'%b%b,"choices":[{"index":%d%b}%b' % (self._head, extra, index, rest, tail)

    def usage_event(self) -> bytes:
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, encode(self._answers.usage()))


async def send_stream(
    connection: Connection, serving: Serving, answers: Answers, chunks: Chunks, frame: EventFrame
) -> None:
    """Streams the answers to the end. Before the first token an engine's failure is raised (and becomes a
    status); after it, it becomes an error event, because the status has been sent."""
    try:
        async with aclosing(answers.outputs(serving.backend)) as outputs:
            async for choice, delta in outputs:
                data = chunks.events(choice, delta)
                serving.metrics.observe_delta(delta)
                last = answers.finished
                if last:
                    data += (frame.usage_event() if frame.include_usage else b"") + DONE
                if data:
                    if not connection.started:
                        await connection.start_stream([answers.times.header()])
                    await connection.write(data, more=not last)
    except BackendError as error:
        failure = unavailable(str(error))
        if not connection.started:
            raise failure from error
        await send_error(connection, failure)
        raise


async def send_error(connection: Connection, error: ApiError) -> None:
    """Ends a stream that has begun."""
    await connection.write(b"data: " + error.body() + b"\n\n" + DONE, more=False)
