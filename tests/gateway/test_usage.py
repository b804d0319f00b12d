"""What accounting reads of bodies and streams, however they are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.usage import Api, Call, Meter, server_timing


def sse(*events: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + end


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], "usage": None}


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
TIMING = {
    "timing": {"queue_ms": 1.5, "prefill_ms": 20.0},
    "speculation": {"drafted_tokens": 8, "accepted_tokens": 5},
}
CHAT = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    content("ein"),
    content("é中"),
    content('"usage"'),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {**USAGE, **TIMING}},
)
ANTHROPIC = b"".join(
    f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    for event in (
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    )
)
RESPONSES = b"".join(
    f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    for event in (
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.output_text.delta", "delta": "b"},
        {
            "type": "response.completed",
            "response": {
                "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}}
            },
        },
    )
)


@pytest.mark.parametrize(
    ("api", "stream"), [("chat", CHAT), ("messages", ANTHROPIC), ("responses", RESPONSES)]
)
@given(cuts=st.lists(st.integers(0, 900), max_size=12), crlf=st.booleans())
def test_however_a_stream_is_cut_its_account_and_bytes_are_the_same(
    api: Api, stream: bytes, cuts: list[int], crlf: bool
) -> None:
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    meter, passed = Meter(api), b""
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        passed += meter.feed(stream[start:end], hide_usage=False)
    assert passed + meter.tail == stream
    assert (meter.prompt, meter.cached, meter.completion) == (9, 4, 3)
    assert meter.first_token
    assert meter.done
    assert meter.error is None


@given(st.lists(st.integers(0, 900), max_size=12))
def test_only_the_usage_chunk_is_hidden(cuts: list[int]) -> None:
    meter, passed = Meter("chat"), b""
    edges = sorted({0, len(CHAT), *(min(cut, len(CHAT)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        passed += meter.feed(CHAT[start:end], hide_usage=True)
    kept = [event for event in CHAT.split(b"\n\n") if b'"choices": []' not in event]
    assert passed == b"\n\n".join(kept)
    assert (meter.drafted, meter.accepted, meter.timing) == (8, 5, {"queue": 1.5, "prefill": 20.0})


def test_the_role_and_empty_chunks_and_pings_are_no_tokens() -> None:
    meter = Meter("chat")
    for event in (
        b": ping\n\n",
        sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, end=b""),
        sse({"choices": [{"delta": {}}]}, end=b""),
    ):
        meter.feed(event, False)
    assert not meter.first_token
    meter.feed(sse({"choices": [{"delta": {"reasoning_content": "hm"}}]}, end=b""), False)
    assert meter.first_token


def test_without_usage_the_chunks_count_and_null_usage_erases_nothing() -> None:
    meter = Meter("chat")
    meter.feed(sse(content("a"), content("b"), content("c")), False)
    assert (meter.chunks, meter.completion) == (3, None)
    meter.feed(sse({"choices": [], "usage": USAGE}, {"choices": [], "usage": None}), False)
    assert meter.completion == 3


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
            lambda x: st.lists(x) | st.dictionaries(st.text(), x),
            max_leaves=8,
        ),
    )
)
def test_unknown_parameters_pass_as_they_are(extra: dict[str, Any]) -> None:
    known = (
        "model",
        "stream",
        "n",
        "priority",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
    )
    body = {name: value for name, value in extra.items() if name not in known}
    call = Call("chat", json.dumps(body | {"stream": True, "messages": []}).encode())
    call.ask_for_usage()
    call.ask_for_usage()  # for a second upstream
    call.set_priority(10)
    assert call.hide_usage
    assert json.loads(call.encode("there")) == body | {
        "stream": True,
        "messages": [],
        "stream_options": {"include_usage": True},
        "priority": 10,
        "model": "there",
    }


@pytest.mark.parametrize(
    ("api", "body", "tokens"),
    [
        ("chat", {"max_tokens": 100, "n": 2}, 200),
        ("chat", {"max_completion_tokens": 7}, 7),
        ("responses", {"max_output_tokens": 9}, 9),
        ("chat", {}, 512),
        ("embeddings", {"input": "x", "max_tokens": 5}, 0),
    ],
)
def test_the_reservation_is_prompt_and_most_output(api: Api, body: dict[str, Any], tokens: int) -> None:
    prompt = len(Call(api, json.dumps(body).encode()).prompt) // 4 + 1
    assert Call(api, json.dumps(body).encode()).reserve(512) == prompt + tokens


@given(st.binary(max_size=60))
def test_any_bytes_are_a_call_or_a_400(body: bytes) -> None:
    status = 200
    try:
        Call("chat", body)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


@given(st.text(max_size=60))
def test_any_server_timing_is_read_or_ignored(header: str) -> None:
    server_timing(header)


def test_server_timing() -> None:
    header = 'queue;dur=1.5, cache;desc="hit", prefill;desc=x;dur=20, bad;dur=z'
    assert server_timing(header) == {"queue": 1.5, "prefill": 20.0}
