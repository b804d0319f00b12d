"""The relay before a real upstream: what clients get, when they get it, and what the ledger says of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from .running import GatewayProgram, Program, call, chat, free_port, mock


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def post(http: aiohttp.ClientSession, gateway: GatewayProgram, body: Any, key: str = "", **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {key or gateway.admin}", **more.pop("headers", {})}
    path = more.pop("path", "/v1/chat/completions")
    return http.post(gateway.url + path, json=body, headers=headers, **more)


async def eventually(check: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not come about"
        await asyncio.sleep(0.05)


async def test_a_stream_passes_unchanged_and_is_not_bunched(
    http: aiohttp.ClientSession, gateway: GatewayProgram, upstream: Program
) -> None:
    body = chat(12, stream=True, stream_options={"include_usage": True}, mock={"itl_ms": 40})
    arrivals, received = [], b""
    async with post(http, gateway, body) as answer:
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert answer.headers["Cache-Control"] == "no-cache"
        assert "gateway;dur=" in answer.headers["Server-Timing"]
        assert "prefill;dur=" in answer.headers["Server-Timing"]
        async for chunk in answer.content.iter_any():
            arrivals.append(time.perf_counter())
            received += chunk
    async with http.post(f"{upstream.url}/v1/chat/completions", json=body) as answer:
        direct = await answer.read()
    assert texts(received) == texts(direct)
    assert received.endswith(b"data: [DONE]\n\n")
    assert usages(received)[-1]["completion_tokens"] == 12
    # Programmed: 12 tokens in 440 ms. Bunched they would come in a few chunks; each must come by itself.
    assert len(arrivals) >= 12
    gaps = sorted(b - a for a, b in itertools.pairwise(arrivals) if b - a > 0.001)
    assert gaps[len(gaps) // 2] > 0.02, "half of the gaps must be about as long as programmed"


def events(stream: bytes) -> list[dict[str, Any]]:
    lines = [
        line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    return [json.loads(line) for line in lines]


def texts(stream: bytes) -> list[str]:
    return [c["delta"].get("content", "") for e in events(stream) for c in e.get("choices", ())]


def usages(stream: bytes) -> list[dict[str, Any]]:
    return [event["usage"] for event in events(stream) if event.get("usage")]


async def test_usage_that_was_not_asked_for_is_counted_and_hidden(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    async with post(http, gateway, chat(7, stream=True), headers={"X-Request-Id": "mine"}) as answer:
        received = await answer.read()
        assert answer.headers["X-Request-Id"] == "mine"
        own = answer.headers["X-Gateway-Request-Id"]
    assert usages(received) == []
    assert all(event["choices"] for event in events(received))
    row = next(row for row in gateway.rows() if row["id"] == own)
    assert (row["client_id"], row["status"], row["prompt_tokens"], row["completion_tokens"]) == (
        "mine",
        "ok",
        4,
        7,
    )
    assert row["ttft_ms"] > 9
    assert row["parts"]["prefill"] > 9
    assert row["gateway_ms"] < row["ttft_ms"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_works_as_it_is(gateway: GatewayProgram, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.admin) as client:
        assert {model.id async for model in client.models.list()} == {"mock", "chat"}
        ask: Any = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        if stream:
            text = ""
            async for chunk in await client.chat.completions.create(**ask, stream=True):
                text += chunk.choices[0].delta.content or ""
        else:
            answer = await client.chat.completions.create(**ask)
            text = answer.choices[0].message.content or ""
        assert len(text.split()) == 4
        vectors = await client.embeddings.create(model="chat", input=["a b", "c"], encoding_format="float")
        assert len(vectors.data) == 2
        with pytest.raises(openai.NotFoundError, match="unheard"):
            await client.chat.completions.create(**{**ask, "model": "unheard"})
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="ft-wrong").models.list()


async def test_unknown_parameters_pass_and_the_class_reaches_the_upstream(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    received: list[dict[str, Any]] = []
    from aiohttp import web

    async def echo(request: web.Request) -> web.Response:
        received.append({"body": await request.json(), "headers": dict(request.headers)})
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    os.environ["TEST_UPSTREAM_KEY"] = "upstream-secret"
    upstreams = [
        {
            "name": "e",
            "base_url": f"http://127.0.0.1:{port}",
            "models": ["m"],
            "priority": True,
            "api_key_env": "TEST_UPSTREAM_KEY",
        }
    ]
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams)
    try:
        await asyncio.to_thread(
            gateway.call, "POST", "/admin/v1/plans", {"name": "agents", "priority": "agent"}
        )
        key = await asyncio.to_thread(gateway.make_key, "agent", plan="agents")
        raw = '{"model":"m","model":"m","x":{"deep":[1.50,"é"]},"priority":-5,"messages":[]}'
        for secret in (key, gateway.admin):
            headers = {"Authorization": f"Bearer {secret}", "Cookie": "c=1"}
            async with http.post(f"{gateway.url}/v1/chat/completions", data=raw, headers=headers) as answer:
                assert answer.status == 200
    finally:
        await asyncio.to_thread(gateway.stop)
        await runner.cleanup()
    assert received[0]["body"] == {"model": "m", "x": {"deep": [1.5, "é"]}, "priority": 10, "messages": []}
    assert received[1]["body"]["priority"] == 0
    assert received[0]["headers"]["Authorization"] == "Bearer upstream-secret"
    assert key not in repr(received)
    assert "Cookie" not in received[0]["headers"]


async def test_a_client_that_leaves_cancels_the_upstream_while_it_is_silent(
    http: aiohttp.ClientSession, gateway: GatewayProgram, upstream: Program
) -> None:
    for stream in (True, False):
        request = asyncio.create_task(
            _read(post(http, gateway, chat(stream=stream, mock={"ttft_ms": 60_000})))
        )
        await eventually(lambda: call("GET", f"{upstream.url}/seen")[1]["in_flight"] == 1)
        request.cancel()
        await eventually(lambda: call("GET", f"{upstream.url}/seen")[1]["in_flight"] == 0, 2.0)
        row = (await asyncio.to_thread(gateway.rows))[0]
        assert (row["status"], row["completion_tokens"], row["error"]) == ("aborted", None, None)


async def _read(request: Any) -> bytes:
    async with request as answer:
        body: bytes = await answer.read()
        return body


async def test_an_aborted_stream_keeps_what_was_observed(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    async with post(http, gateway, chat(500, stream=True, mock={"itl_ms": 20})) as answer:
        own = answer.headers["X-Gateway-Request-Id"]
        received = b""
        while received.count(b"data:") < 8:
            received += await answer.content.readany()
        answer.close()
    await asyncio.sleep(0.3)
    row = next(row for row in await asyncio.to_thread(gateway.rows) if row["id"] == own)
    assert row["status"] == "aborted"
    assert 5 <= row["completion_tokens"] < 60


async def test_the_upstreams_death_ends_the_stream_with_an_error(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    received = await _read(post(http, gateway, chat(9, stream=True, mock={"die_after": 3})))
    assert received.endswith(b"data: [DONE]\n\n")
    last = events(received)[-1]["error"]
    assert (last["code"], last["type"]) == ("upstream_died", "server_error")
    row = gateway.rows()[0]
    assert (row["status"], row["completion_tokens"]) == ("error", 3)
    async with post(http, gateway, chat(9, mock={"status": 400})) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "The mock was told to fail."


async def test_errors_inside_a_stream_are_errors(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    received = await _read(post(http, gateway, chat(9, stream=True, mock={"error_after": 2})))
    assert "error" in events(received)[-1]
    row = gateway.rows()[0]
    assert (row["status"], row["error"]) == ("error", "The mock was told to fail here.")


async def test_limits_answer_429_with_when_to_come_back(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    key = gateway.make_key("limited", rpm=3, max_concurrency=2)
    slow = [
        asyncio.create_task(_read(post(http, gateway, chat(stream=True, mock={"ttft_ms": 1000}), key)))
        for _ in range(2)
    ]
    await asyncio.sleep(0.4)
    async with post(http, gateway, chat(), key) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert "concurrent requests: 2" in (await answer.json())["error"]["message"]
    await asyncio.gather(*slow)
    async with post(http, gateway, chat(), key) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    async with post(http, gateway, chat(), key) as answer:
        assert answer.status == 429
        assert 50 <= int(answer.headers["Retry-After"]) <= 60
    status, usage = gateway.call("GET", "/v1/usage", key=key)
    assert status == 200
    await asyncio.sleep(0.6)
    usage = gateway.call("GET", "/v1/usage", key=key)[1]
    assert sum(row["limited"] for row in usage["data"]) == 2


async def test_bad_bodies_get_one_clear_error(http: aiohttp.ClientSession, gateway: GatewayProgram) -> None:
    for body, named in (
        (b"{", "JSON"),
        (b"[]", "JSON"),
        (b'{"model": 5}', "model"),
        (b"{}", "model"),
        (b'{"model":"mock","max_tokens":"x"}', "max_tokens"),
    ):
        async with http.post(
            f"{gateway.url}/v1/chat/completions",
            data=body,
            headers={"Authorization": f"Bearer {gateway.admin}"},
        ) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
            assert named in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
    async with http.get(f"{gateway.url}/v1/chat/completions") as answer:
        assert answer.status == 405


async def test_it_goes_to_another_upstream_before_the_first_byte(
    http: aiohttp.ClientSession, upstream: Program, tmp_path: Path
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    upstreams = [
        {"name": "gone", "base_url": gone, "models": ["a"]},
        {"name": "mock", "base_url": upstream.url, "models": ["mock"]},
    ]
    alias = '[aliases.best]\nmodel = "a"\nfallbacks = ["mock"]\n'
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams, alias)
    try:
        async with post(http, gateway, chat() | {"model": "best"}) as answer:
            assert answer.status == 200
        async with post(http, gateway, chat() | {"model": "a"}) as answer:
            assert answer.status == 502
        row = (await asyncio.to_thread(gateway.rows))[-1]
        assert (row["alias"], row["model"], row["upstream"], row["status"]) == ("best", "mock", "mock", "ok")
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_reload_changes_upstreams_and_drops_no_stream(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    first, second = await asyncio.gather(
        *(asyncio.to_thread(mock, "--model", name) for name in ("one", "two"))
    )
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, [{"name": "one", "base_url": first.url}])
    try:
        running = asyncio.create_task(
            _read(post(http, gateway, chat(40, stream=True, mock={"itl_ms": 50}) | {"model": "one"}))
        )
        await eventually(lambda: call("GET", f"{first.url}/seen")[1]["in_flight"] == 1)
        gateway.write(
            [{"name": "two", "base_url": second.url}],
            "",
            {"console": False, "state_dir": str(tmp_path / "state")},
        )
        gateway.process.send_signal(signal.SIGHUP)
        await eventually(lambda: [m["id"] for m in gateway.call("GET", "/v1/models")[1]["data"]] == ["two"])
        gateway.config.write_text("port = 'x'")
        gateway.process.send_signal(signal.SIGHUP)
        assert (await running).endswith(b"data: [DONE]\n\n")
        async with post(http, gateway, chat() | {"model": "two"}) as answer:
            assert answer.status == 200
    finally:
        output = await asyncio.to_thread(gateway.stop)
        first.stop()
        second.stop()
    assert "nothing is changed" in output


async def test_pings_keep_a_silent_stream_open_and_count_as_no_token(
    http: aiohttp.ClientSession, upstream: Program, tmp_path: Path
) -> None:
    gateway = await asyncio.to_thread(
        GatewayProgram, tmp_path, [{"name": "m", "base_url": upstream.url}], ping="100ms"
    )
    try:
        received = await _read(post(http, gateway, chat(3, stream=True, mock={"ttft_ms": 600})))
        assert received.startswith(b": ping\n\n: ping\n\n")
        assert len("".join(texts(received)).split()) == 3
        row = (await asyncio.to_thread(gateway.rows))[0]
        assert row["ttft_ms"] > 590
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_silence_and_slow_starts_are_limited(
    http: aiohttp.ClientSession, upstream: Program, tmp_path: Path
) -> None:
    gateway = await asyncio.to_thread(
        GatewayProgram, tmp_path, [{"name": "m", "base_url": upstream.url}], first_byte="300ms", idle="300ms"
    )
    try:
        async with post(http, gateway, chat(mock={"hang": True})) as answer:
            assert answer.status == 504
        received = await _read(post(http, gateway, chat(3, stream=True, mock={"itl_ms": 5000})))
        assert events(received)[-1]["error"]["code"] == "upstream_silent"
        await eventually(lambda: call("GET", f"{upstream.url}/seen")[1]["in_flight"] == 0)
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_a_restart_keeps_keys_limits_and_running_totals(
    http: aiohttp.ClientSession, upstream: Program, tmp_path: Path
) -> None:
    upstreams = [{"name": "m", "base_url": upstream.url, "models": ["mock"]}]
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams)
    key = await asyncio.to_thread(gateway.make_key, "a", rpm=4)
    admin = gateway.admin
    statuses = []
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        for _ in range(2):
            async with post(http, gateway, chat(), key) as answer:
                statuses.append(answer.status)
        pids = await asyncio.to_thread(gateway.workers)
        if number == signal.SIGKILL:
            for pid in pids:
                os.kill(pid, number)
        await asyncio.to_thread(gateway.stop, number)
        gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams)
        assert gateway.admin == "", "the admin key is shown once"
        gateway.admin = admin
    try:
        assert statuses == [200, 200, 200, 200, 429, 429], (
            "the limit of 4 holds across an orderly and a sudden end"
        )
        rows = await asyncio.to_thread(gateway.rows)
        assert sorted(row["status"] for row in rows) == ["limited"] * 2 + ["ok"] * 4
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_metrics_are_for_admins_and_name_no_key(
    http: aiohttp.ClientSession, gateway: GatewayProgram
) -> None:
    key = gateway.make_key("metered")
    await _read(post(http, gateway, chat(3, stream=True), key))
    assert gateway.call("GET", "/metrics", key=key)[0] == 403
    assert gateway.call("GET", "/metrics", key="")[0] == 401
    text = gateway.call("GET", "/metrics")[1]
    assert 'firsttoken_gateway_key_requests_total{key="metered",status="ok"} 1.0' in text
    assert (
        'firsttoken_gateway_time_to_first_token_seconds_count{model="mock",traffic="live",upstream="one"}'
        in text
    )
    assert key not in text
    assert "event_loop_lag" in text


async def test_only_a_pooled_socket_that_closed_is_tried_again(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    heads: list[int] = []  # per request, how many its connection has had

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            answer
        )
        for nth in range(2):
            request = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", request.lower() + b"content-length: 0")[1])  # type: ignore[index]
            body = await reader.readexactly(length)
            if length:
                heads.append(nth)
            if nth == 1 or b"fresh" in body:
                break  # closes without a byte, as a server does whose idle limit has just passed
            writer.write(head + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstreams = [{"name": "m", "base_url": url, "models": ["mock"]}]
    gateway = await asyncio.to_thread(GatewayProgram, tmp_path, upstreams, health_interval="60s")
    try:
        for _ in range(4):
            async with post(http, gateway, chat()) as answer:
                assert answer.status == 200
        async with post(http, gateway, chat(prompt="fresh")) as answer:
            assert answer.status == 502
    finally:
        await asyncio.to_thread(gateway.stop)
        server.close()
    assert heads.count(1) >= 3, "pooled sockets were tried"
    assert heads.count(0) == 5, "each request reached a fresh socket once"
