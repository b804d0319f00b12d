"""Frames survive any split of the bytes; messages and merged outputs lose nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.backends import wire
from firsttoken.backends.base import EngineStats
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import Request, RequestOutput, RequestTiming, SamplingParams, TokenLogprobs

SAMPLING = SamplingParams(
    temperature=0,
    logit_bias={7: -100.0, 49151: 1.5},
    stop_token_ids=(1, 2),
    seed=-(1 << 40),
    logprobs=3,
    max_tokens=5,
)
REQUEST = Request(request_id="é-1", prompt_token_ids=[0, 1 << 20], sampling=SAMPLING, cache_salt="盐")
LOGPROBS = TokenLogprobs(token_id=3, logprob=-math.inf, rank=2, top=[(4, -0.5), (3, -1.25)])
OUTPUT = RequestOutput(
    request_id="é-1",
    token_ids=[5, 6],
    logprobs=[LOGPROBS, LOGPROBS],
    prompt_logprobs=[None, LOGPROBS],
    finish_reason="stop",
    stop_reason=2,
    num_cached_tokens=16,
    timing=RequestTiming(queue=0.5, prefill=0.25),
)
TO_ENGINE = [
    wire.Start(EngineConfig(model="m", kv_cache_memory="2GiB"), 12.5),
    wire.Submit(REQUEST),
    wire.Abort("é-1"),
    wire.Call(3, "reconfigure", [{"max_num_seqs": 2, "ttft_slo_ms": None}]),
]
TO_SERVER = [
    wire.Progress("load", 1.5),
    wire.Ready({"model": "m", "startup": {"load": 1.5}}),
    wire.Step([OUTPUT], EngineStats(finished={"stop": 2}, draft_tokens_per_pos=[3, 2])),
    wire.Step([]),
    wire.Reply(3, {"a": [1, None]}),
    wire.Reply(4, error="no"),
    wire.Failed("gone", is_config=True),
]


@given(st.lists(st.binary(max_size=300), max_size=12), st.data())
def test_frames_come_back_whole_however_the_bytes_are_split(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(wire.HEADER.pack(len(payload)) + payload for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = wire.FrameReader()
    received = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:end])
    assert received == payloads


def test_a_frame_is_delivered_with_its_last_byte() -> None:
    frame = bytes(wire.pack(wire.Abort("a")))
    reader = wire.FrameReader()
    assert [reader.feed(frame[i : i + 1]) for i in range(len(frame))][:-1] == [[]] * (len(frame) - 1)
    assert len(wire.FrameReader().feed(frame)) == 1


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_the_engine_arrive_as_they_were(message: wire.ToEngine) -> None:
    (payload,) = wire.FrameReader().feed(wire.pack(message))
    assert wire.decode_to_engine(payload) == message


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda message: type(message).__name__)
def test_messages_to_the_server_arrive_as_they_were(message: wire.ToServer) -> None:
    (payload,) = wire.FrameReader().feed(wire.pack(message))
    assert wire.decode_to_server(payload) == message


def test_a_damaged_length_is_an_error_and_not_an_allocation() -> None:
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.FrameReader().feed(b"\xff\xff\xff\xff")


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_an_error(payload: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_to_server):
        with contextlib.suppress(wire.WireError):
            decode(payload)


@pytest.mark.parametrize("salt", ["\ud800", object()], ids=["lone surrogate", "no msgpack type"])
def test_what_has_no_form_on_the_wire_is_an_error(salt: str) -> None:
    with pytest.raises(wire.WireError, match="cannot be sent"):
        wire.pack(wire.Submit(dataclasses.replace(REQUEST, cache_salt=salt)))


def test_a_message_over_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 100)
    with pytest.raises(wire.WireError, match="over the limit of 100"):
        wire.pack(wire.Abort("x" * 100))


@st.composite
def answers(draw: st.DrawFn) -> list[RequestOutput]:
    """The outputs of one request, step by step, as an engine sends them."""
    steps = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8))
    with_logprobs = draw(st.booleans())
    outputs = []
    drafts = 0
    for i, tokens in enumerate(steps):
        drafts += draw(st.integers(0, 2))
        outputs.append(
            RequestOutput(
                request_id="r",
                token_ids=tokens,
                logprobs=[TokenLogprobs(token_id=t, logprob=-1.0, rank=1) for t in tokens]
                if with_logprobs
                else None,
                num_drafts=drafts,
            )
        )
        if i == 0:
            outputs[0].num_cached_tokens = 32
            outputs[0].prompt_logprobs = [None, LOGPROBS]
            outputs[0].timing = RequestTiming(queue=0.1, prefill=0.2)
    outputs[-1].finish_reason, outputs[-1].stop_reason = "stop", 9
    outputs[-1].timing = RequestTiming(queue=0.1, prefill=0.2, first_decode=0.3)
    return outputs


@given(answers(), st.integers(1, 8))
def test_merged_outputs_say_what_the_single_ones_said(outputs: list[RequestOutput], group: int) -> None:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    drafts = outputs[-1].num_drafts
    merged = []
    for i in range(0, len(outputs), group):
        first, *others = outputs[i : i + group]
        for other in others:
            wire.merge_output(first, other)
        merged.append(first)
    assert [token for output in merged for token in output.token_ids] == tokens
    assert [entry for output in merged for entry in output.logprobs or []] == logprobs
    assert [output.finished for output in merged] == [False] * (len(merged) - 1) + [True]
    assert merged[0].num_cached_tokens == 32
    assert merged[0].prompt_logprobs == [None, LOGPROBS]
    last = merged[-1]
    assert (last.stop_reason, last.num_drafts) == (9, drafts)
    assert last.timing == RequestTiming(queue=0.1, prefill=0.2, first_decode=0.3)
