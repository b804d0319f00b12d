"""The measuring client against real sockets, and its reading of raw answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.bench import metrics
from firsttoken.bench.client import (
    Call,
    Client,
    ClientHealth,
    Record,
    read_answer,
    server_timing,
    sse_events,
    watch_client,
)
from firsttoken.bench.load import closed_loop, open_loop, poisson_times
from firsttoken.bench.stamped_http import Answer, Http, Unreachable

HELLO = [{"role": "user", "content": "hello there"}]


def call(tokens: int = 5, **mock: object) -> Call:
    return Call(messages=HELLO, max_tokens=tokens, extra={"mock": mock} if mock else {})


@asynccontextmanager
async def client_of(url: str, limit: float = 20.0) -> AsyncIterator[Client]:
    async with Http(url, timeout=limit) as http:
        yield Client(http, "mock")


async def until(client: Client, in_flight: int) -> dict[str, Any]:
    """Asks the mock until that many requests are in flight."""
    for _ in range(500):
        seen = await client.get_json("/seen")
        if seen["in_flight"] == in_flight:
            return dict(seen)
        await asyncio.sleep(0.01)
    raise AssertionError(f"never {in_flight} in flight: {seen}")


# ------------------------------------------------------------------ against the mock server


async def test_a_stream_becomes_a_record(mock: Callable[..., str]) -> None:
    async with client_of(mock("--ttft", "30ms", "--itl", "5ms")) as client:
        record = await client.stream(call(5))
    assert record.ok
    assert record.error is None
    assert (record.completion_tokens, record.cached_tokens, record.finish_reason) == (5, 0, "length")
    assert len(record.chunks) == 5
    assert len(record.text.split()) == 5
    times = [t for t, _ in record.chunks]
    assert times == sorted(times)
    assert times[0] >= 0.030  # programmed, and a sleep never ends early
    assert record.ended is not None
    assert record.ended >= times[-1]
    assert record.server["prefill"] >= 0.030


async def test_role_empty_chunks_and_pings_are_no_token(mock: Callable[..., str]) -> None:
    url = mock("--ttft", "60ms", "--role-first", "--empty-first", "--ping", "10ms")
    async with client_of(url) as client:
        record = await client.stream(call(3))
    ttfb, ttft = metrics.ttfb(record), metrics.ttft(record)
    assert len(record.chunks) == 3
    assert ttfb is not None
    assert ttft is not None
    assert ttft >= 60
    assert ttft - ttfb >= 20  # the role chunk came long before


async def test_tokens_are_the_servers_count_not_the_chunks(mock: Callable[..., str]) -> None:
    async with client_of(mock("--tokens-per-chunk", "4")) as client:
        record = await client.stream(call(9))
    assert record.completion_tokens == 9
    assert len(record.chunks) == 3  # 1 + 4 + 4
    assert metrics.tokens_per_chunk(record) == 3
    span = (record.chunks[-1][0] - record.chunks[0][0]) * 1e3
    assert metrics.tpot(record) == pytest.approx(span / 8)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"error_after": 2}, "error event inside a 200 answer: The mock was told to fail here."),
        ({"die_after": 2}, "the stream ended without [DONE]"),
        ({"status": 503}, "HTTP 503: The mock was told to fail."),
        ({"status": 429}, "HTTP 429"),
    ],
)
async def test_failures_are_failures(mock: Callable[..., str], wish: dict[str, int], message: str) -> None:
    async with client_of(mock()) as client:
        record = await client.stream(call(8, **wish))
        again = await client.stream(call(3))
    assert not record.ok
    assert message in (record.error or "")
    assert metrics.ttft(record) is None
    assert metrics.tpot(record) is None
    assert again.ok  # the client survives


async def test_a_silent_server_meets_the_time_limit(mock: Callable[..., str]) -> None:
    url = mock()
    async with client_of(url, limit=0.3) as client:
        record = await client.stream(call(hang=True))
    assert "no complete answer within 0.3 s" in (record.error or "")


async def test_leaving_closes_the_connection(mock: Callable[..., str]) -> None:
    async with client_of(mock("--itl", "20ms")) as client:
        task = asyncio.create_task(client.stream(call(500)))
        await until(client, in_flight=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = await until(client, in_flight=0)
    assert seen["by_status"]["disconnected"] == 1


async def test_closed_loop_keeps_its_concurrency(mock: Callable[..., str]) -> None:
    async with client_of(mock("--itl", "3ms")) as client:
        trial = await closed_loop(client, [call(6)] * 7, concurrency=3)
        seen = await client.get_json("/seen")
    assert len(trial.records) == 7
    assert all(record.ok for record in trial.records)
    assert seen["max_in_flight"] == 3
    assert trial.max_overlap() <= 3
    ends = [record.sent + (record.ended or 0.0) for record in trial.records]
    assert trial.wall == pytest.approx(max(ends) - min(record.sent for record in trial.records))


async def test_open_loop_does_not_wait_for_answers(mock: Callable[..., str]) -> None:
    """Requests are due at their times although one slot serves them all: the queue is part of the TTFT."""
    async with client_of(mock("--slots", "1", "--ttft", "40ms")) as client:
        times = [0.0, 0.001, 0.002, 0.003]
        trial = await open_loop(client, [call(2)] * 4, times)
    intended = [record.intended - trial.records[0].intended for record in trial.records]
    assert intended == pytest.approx(times)
    ttfts = [metrics.ttft_intended(record) or 0.0 for record in trial.records]
    assert ttfts[-1] >= 4 * 40 - 3  # the fourth waits for three others
    assert all(record.sent >= record.intended for record in trial.records)


def test_poisson_times_have_the_rate_and_repeat() -> None:
    times = poisson_times(20_000, rate=50.0, seed=3)
    assert times == poisson_times(20_000, rate=50.0, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.05)


# ------------------------------------------------------------------ against hand-made servers


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncIterator[str]:
    """Each connection gets the next answer after its first request, and is then closed."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_kept_connection_closed_meanwhile_is_replaced() -> None:
    async with raw_server(OK, OK) as url, Http(url, timeout=5) as http:
        assert (await http.request("GET", "/a")).body == b"{}"
        await asyncio.sleep(0.05)
        second = await http.request("GET", "/b")
    assert second.body == b"{}"


async def test_a_server_that_is_not_http() -> None:
    async with raw_server(b"SSH-2.0-OpenSSH_9.2\r\n") as url, Http(url, timeout=5) as http:
        with pytest.raises(Unreachable, match="not HTTP"):
            await http.request("GET", "/")


async def test_a_server_that_closes_at_once() -> None:
    async with raw_server(b"") as url, Http(url, timeout=5) as http:
        with pytest.raises(Unreachable, match="without an answer"):
            await http.request("GET", "/")


async def test_a_body_without_length_ends_with_the_connection() -> None:
    async with raw_server(b"HTTP/1.0 200 OK\r\n\r\nhello") as url, Http(url, timeout=5) as http:
        answer = await http.request("GET", "/")
    assert answer.complete
    assert answer.body == b"hello"


async def test_a_body_cut_short_is_not_complete() -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"
    async with raw_server(cut) as url, Http(url, timeout=5) as http:
        assert not (await http.request("GET", "/")).complete


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http:///v1"])
def test_addresses_that_cannot_work(url: str) -> None:
    with pytest.raises(Unreachable, match="no http"):
        Http(url)


# ------------------------------------------------------------------ reading


def event(**data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


STREAM = (
    event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    + b": ping\n\n"
    + event(choices=[{"delta": {"reasoning_content": "想"}}])
    + event(choices=[{"delta": {"content": "héllo "}}])
    + event(choices=[{"delta": {"content": "🙂"}, "finish_reason": "stop"}])
    + b"data: [DONE]\r\n\r\n"
)


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True).map(sorted))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int]) -> None:
    """Any cutting gives the same events, each stamped with the piece that holds its last byte."""
    edges = [0, *cuts, len(STREAM)]
    pieces = [(float(i), STREAM[a:b]) for i, (a, b) in enumerate(pairwise(edges))]
    events = list(sse_events(pieces))
    assert [data for _, data in events] == [data for _, data in sse_events([(0.0, STREAM)])]
    assert len(events) == 5
    stamps = [stamp for stamp, _ in events]
    assert stamps == sorted(stamps)
    end_of_first = STREAM.index(b"\n\n") + 2
    assert stamps[0] == next(i for i, edge in enumerate(edges[1:]) if edge >= end_of_first)


def read(body: bytes, **extra: object) -> Record:
    headers = {"content-type": "text/event-stream"}
    answer = Answer(status=200, headers=headers, sent=10.0, complete=True, pieces=[(10.5, body)], ended=10.6)
    record = Record()
    read_answer(answer, record)
    return record


def test_reasoning_is_a_token_but_not_visible() -> None:
    record = read(STREAM)
    assert record.ok
    assert record.text == "想héllo 🙂"
    assert metrics.ttft(record) == pytest.approx(500)
    assert metrics.ttfvt(record) == pytest.approx(500)
    hidden = read(event(choices=[{"delta": {"reasoning_content": "想"}}]) + b"data: [DONE]\n\n")
    assert metrics.ttft(hidden) is not None
    assert metrics.ttfvt(hidden) is None


def test_what_the_server_does_not_say_is_none() -> None:
    record = read(STREAM)
    assert record.completion_tokens is None
    assert record.cached_tokens is None
    assert record.drafted is None
    assert metrics.tpot(record) is None
    assert metrics.tokens_per_chunk(record) is None


def test_usage_with_every_chunk_keeps_the_last() -> None:
    body = b"".join(
        event(choices=[{"delta": {"content": "a"}}], usage={"prompt_tokens": 3, "completion_tokens": n})
        for n in (1, 2, 3)
    )
    assert read(body + b"data: [DONE]\n\n").completion_tokens == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: [DONE]\n\n", "no token"),
        (event(choices=[{"delta": {"content": "a"}}]), "without [DONE]"),
        (b"data: {oops\n\n", "not JSON"),
        (event(error={"message": "boom"}) + b"data: [DONE]\n\n", "boom"),
        (event(choices=[{"delta": {"content": "a"}}]) + event(error="gone") + b"data: [DONE]\n\n", "gone"),
    ],
)
def test_a_200_can_still_be_a_failure(body: bytes, message: str) -> None:
    assert message in (read(body).error or "")


def test_firsttokens_own_usage() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "timing": {"queue_ms": 1.0, "prefill_ms": 20.0, "first_decode_ms": None},
        "speculation": {"drafts": 2, "drafted_tokens": 6, "accepted_tokens": 3},
    }
    record = read(STREAM.replace(b"data: [DONE]", event(choices=[], usage=usage) + b"data: [DONE]"))
    assert record.cached_tokens == 0  # said to be 0, which is not None
    assert record.server == {"queue": 0.001, "prefill": 0.02}
    assert (record.drafts, record.drafted, record.accepted) == (2, 6, 3)


def test_server_timing_header() -> None:
    assert server_timing('queue;dur=0.5, prefill;desc="x";dur=35, cache') == {
        "queue": 0.0005,
        "prefill": 0.035,
    }


# ------------------------------------------------------------------ the client's own health


async def test_a_blocked_event_loop_voids_the_verdict() -> None:
    async with watch_client() as health:
        for _ in range(5):
            await asyncio.sleep(0.02)
            time.sleep(0.08)  # noqa: ASYNC251 - the fault
    assert health.lag_p99 is not None
    assert "event loop was" in (health.verdict(ttft=0.05) or "")


def test_verdicts() -> None:
    calm = ClientHealth(lag_p99=0.002, dispatch_p99=0.001, cpu_share=0.1)
    assert calm.verdict(0.05) is None
    assert calm.verdict(None) is None
    assert "sent requests" in (ClientHealth(dispatch_p99=0.3).verdict(0.5) or "")
    assert "of a core" in (ClientHealth(cpu_share=0.95).verdict(0.5) or "")
    assert ClientHealth(lag_p99=0.04).verdict(0.5) is None  # 40 ms of 500 is tolerable, of 50 it is not
    assert ClientHealth(lag_p99=0.04).verdict(0.05) is not None
