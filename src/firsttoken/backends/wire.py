"""What the server's process and the engine's process say to each other: messages and framing. No torch.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The bytes travel over one socket pair
between two processes of the same version on the same machine, so there is no negotiation; the size limit is
there to turn a stream that lost its frame boundaries into an error at once instead of a huge allocation.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from firsttoken.backends.base import EngineStats
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import Request, RequestOutput

MAX_FRAME = 1 << 28
"""Bytes of the largest payload: far above a million-token prompt (5 MB)."""

HEADER = struct.Struct(">I")


class WireError(ValueError):
    """Something that cannot be put into a frame, or bytes that are none."""


# -- to the engine -------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: load this."""

    config: EngineConfig
    spawned_at: float
    """`time.monotonic()` just before the process was started; the clock is shared by all processes."""


class Submit(msgspec.Struct, tag="submit", array_like=True):
    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True):
    request_id: str


class Call(msgspec.Struct, tag="call", array_like=True):
    """A question that is answered between two steps, with a Reply of the same id."""

    id: int
    method: str
    """One of `worker.CALLS`."""
    arguments: list[Any]


# -- to the server -------------------------------------------------------------------------------------------


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """A start-up stage has ended and took this many seconds."""

    stage: str
    seconds: float


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is warm. `info` holds the fields of BackendInfo."""

    info: dict[str, Any]


class Step(msgspec.Struct, tag="step", array_like=True):
    """What a step produced, and at a bounded rate a snapshot. Also the heartbeat: both may be empty."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None


class Reply(msgspec.Struct, tag="reply", array_like=True):
    id: int
    result: Any = None
    error: str | None = None
    """Instead of a result: the one line of the ConfigError."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The last message of a process that ends by itself: why, in one line."""

    message: str
    is_config: bool = False
    """The user can mend it: raised as ConfigError, without a traceback in the log."""


ToEngine = Start | Submit | Abort | Call
ToServer = Progress | Ready | Step | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def pack(message: ToEngine | ToServer) -> bytearray:
    """A whole frame. Raises WireError if a value has no msgpack form or the frame would be too large."""
    frame = bytearray(HEADER.size)
    try:
        _encoder.encode_into(message, frame, HEADER.size)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # an unknown type, a lone surrogate, an int over 64 bits
        raise WireError(f"cannot be sent to another process: {error}") from error
    size = len(frame) - HEADER.size
    if size > MAX_FRAME:
        raise WireError(f"a message of {size} bytes is over the limit of {MAX_FRAME}")
    HEADER.pack_into(frame, 0, size)
    return frame


class FrameReader:
    """Cuts a stream of bytes, however it was split on its way, back into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """The payloads that `data` completes, in order. Raises WireError at a length over the limit."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME:
                raise WireError(
                    f"a frame of {size} bytes is over the limit of {MAX_FRAME}: the stream is damaged"
                )
            end = start + HEADER.size + size
            if len(buffer) < end:
                break
            payloads.append(bytes(memoryview(buffer)[start + HEADER.size : end]))
            start = end
        del buffer[:start]
        return payloads


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises WireError."""
    try:
        return _to_engine.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message to the engine: {error}") from error


def decode_to_server(payload: bytes) -> ToServer:
    """Raises WireError."""
    try:
        return _to_server.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message to the server: {error}") from error


def merge_output(into: RequestOutput, new: RequestOutput) -> None:
    """Adds the output of a later step to an earlier one of the same request, as if one step had made both.

    Both processes use it where a reader is slower than the engine: nothing is lost, and what is held for a
    request is one object, bounded by its max_tokens. Lists of `into` are extended in place.
    """
    into.token_ids.extend(new.token_ids)
    if new.logprobs is not None:
        into.logprobs = new.logprobs if into.logprobs is None else into.logprobs + new.logprobs
    if into.prompt_logprobs is None:
        into.prompt_logprobs = new.prompt_logprobs
    if into.num_cached_tokens is None:
        into.num_cached_tokens = new.num_cached_tokens
    if new.timing is not None:
        into.timing = new.timing
    if new.finish_reason is not None:
        into.finish_reason, into.stop_reason, into.error = new.finish_reason, new.stop_reason, new.error
    # Cumulative counters: the later one holds the earlier.
    into.num_preemptions = max(into.num_preemptions, new.num_preemptions)
    into.num_drafts = max(into.num_drafts, new.num_drafts)
    into.num_draft_tokens = max(into.num_draft_tokens, new.num_draft_tokens)
    into.num_accepted_tokens = max(into.num_accepted_tokens, new.num_accepted_tokens)
