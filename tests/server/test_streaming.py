"""What leaves the socket, and when: raw bytes, no client library between."""

from __future__ import annotations

import re
import socket
import time

import pytest

from .running import Running

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
TEXT = "天气很好 🙂👩‍👩‍👧 Zwölf «ok»"


def contents(server: Running, **body: object) -> list[str]:
    events = server.chat(stream=True, **body).events[:-1]
    return [event["choices"][0]["delta"].get("content", "") for event in events]


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return data


def test_nothing_is_sent_before_the_first_token_and_then_all_at_once(server: Running) -> None:
    """Headers, role chunk and first content arrive together: clients take the first chunk for the first token."""
    server.backend.stopped = True
    with server.open("/v1/chat/completions", CHAT) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        server.backend.gap = 0.2  # so that what comes first is the first token's alone
        server.backend.stopped = False
        data = connection.recv(1 << 16)
        connection.settimeout(60)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"role":"assistant","content":""' in data
        assert len(re.findall(rb'"content":"[^"]', data)) == 1


def test_a_chunk_leaves_when_its_step_is_made(server: Running) -> None:
    server.backend.gap = 0.05
    arrivals = []
    with server.open("/v1/chat/completions", CHAT) as connection:
        data = b""
        while b"[DONE]" not in data:
            part = connection.recv(1 << 16)
            arrivals.append((time.monotonic(), len(re.findall(rb'"content":"[^"]', part))))
            data += part
    assert max(count for _, count in arrivals[:-1]) == 1
    assert len(arrivals) >= len(re.findall(rb'"content":"[^"]', data))


def test_headers_for_proxies(server: Running) -> None:
    headers = server.chat(stream=True).headers
    assert headers["x-accel-buffering"] == "no"
    assert headers["cache-control"] == "no-cache"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("per_step", [1, 3])
def test_no_broken_characters(server: Running, per_step: int) -> None:
    server.says(TEXT)
    server.backend.per_step = per_step
    deltas = contents(server)
    assert "".join(deltas) == TEXT
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_answer_cut_inside_a_character(server: Running) -> None:
    server.says("🙂" * 3)
    tokens = len(server.tokenizer.encode("🙂" * 3))
    expected = server.tokenizer.decode(server.tokenizer.encode("🙂" * 3)[: tokens - 1])
    assert expected.endswith("\ufffd")
    assert "".join(contents(server, max_tokens=tokens - 1)) == expected


@pytest.mark.parametrize("per_step", [1, 2, 7])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(server: Running, per_step: int, stream: bool, include: bool) -> None:
    """The text ends at the match, the usage with the token that completed it, and the engine is told at once."""
    text = "One fish, two fish. Red fish, blue fish."
    server.says(text)
    server.backend.per_step = per_step
    body = {"stop": ["Red f", "never"], "include_stop_str_in_output": include, "stream": stream}
    if stream:
        *events, usage, _ = server.chat(**body, stream_options={"include_usage": True}).events
        shown = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        choice, usage = events[-1]["choices"][0], usage["usage"]
    else:
        reply = server.chat(**body).json
        choice, usage = reply["choices"][0], reply["usage"]
        shown = choice["message"]["content"]
    assert shown == "One fish, two fish. " + ("Red f" if include else "")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Red f")
    ids = server.tokenizer.encode(text)
    needed = next(n for n in range(len(ids)) if "Red f" in server.tokenizer.decode(ids[:n]))
    assert usage["completion_tokens"] == needed
    assert server.backend.aborted == [server.backend.requests[-1].request_id]


def test_the_beginning_of_a_stop_string_is_shown_when_it_turns_out_to_be_none(server: Running) -> None:
    server.says("fish and chip")
    deltas = contents(server, stop=["chips", "h a lot"])
    assert "".join(deltas) == "fish and chip"


def test_min_tokens_comes_before_stop_strings(server: Running) -> None:
    server.says("stop stop stop go")
    first = len(server.tokenizer.encode("stop stop"))
    assert "".join(contents(server, stop="stop", min_tokens=first)) == "stop stop "


def test_logprobs_end_with_the_match(server: Running) -> None:
    server.says("One fish, two fish")
    server.backend.per_step = 50
    choice = server.chat(stop=", t", logprobs=True).json["choices"][0]
    named = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert choice["message"]["content"] == "One fish"
    assert named.startswith("One fish, t")
    assert not named.endswith("fish")


def test_one_choice_stopped_and_the_other_goes_on(server: Running) -> None:
    ids = [server.tokenizer.encode(text) for text in ("a END b", "no such thing, and long enough")]
    server.backend.answer = lambda request: ids[request.choice_index]
    server.backend.gap = 0.01
    reply = server.chat(n=2, stop="END").json
    assert [c["message"]["content"] for c in reply["choices"]] == ["a ", "no such thing, and long enough"]
    assert [c["stop_reason"] for c in reply["choices"]] == ["END", None]


def test_slow_reader_delays_nobody_else(server: Running) -> None:
    server.backend.answer = lambda request: [*server.tokenizer.encode("x" * 20)] * 4000
    server.backend.per_step = 50
    body = CHAT | {"max_tokens": 4000, "return_token_ids": True}
    with server.open("/v1/chat/completions", body, receive_buffer=4096) as slow:
        slow.recv(10)
        time.sleep(0.2)
        server.says("quick")
        assert server.chat().json["choices"][0]["message"]["content"] == "quick"
        # It is only slow: all that it was to get is still there for it.
        assert receive_until(slow, b"[DONE]").count(b'"finish_reason":"length"') == 1
