"""A client that leaves: whatever its request is doing, the engine is told within a step."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import pytest

from .running import Running

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000 // 50}


def endless(server: Running) -> None:
    token = server.tokenizer.encode("x")
    server.backend.answer = lambda request: token * 100_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["silent", "answering"])
def test_disconnect_aborts(server: Running, stream: bool, n: int, when: str) -> None:
    endless(server)
    backend = server.backend
    backend.stopped = when == "silent"
    backend.gap = 0.01
    connection = server.open("/v1/chat/completions", CHAT | {"stream": stream, "n": n})
    if when == "answering" and stream:
        assert connection.recv(10)
    else:
        server.until(lambda: len(backend.live) == n, "the requests run")
    connection.close()
    server.until(lambda: not backend.live, "the requests are aborted")
    assert sorted(backend.aborted) == sorted(request.request_id for request in backend.requests)
    assert len(backend.aborted) == n
    backend.stopped = False


def test_disconnect_while_the_body_is_sent(server: Running) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    connection.close()
    assert server.complete(max_tokens=1).status == 200
    assert len(server.backend.requests) == 1


def test_disconnect_of_a_client_that_does_not_read(server: Running) -> None:
    endless(server)
    server.backend.per_step = 50
    body = CHAT | {"stream": True, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}
    connection = server.open("/v1/chat/completions", body, receive_buffer=4096)
    server.until(lambda: bool(server.backend.live), "it runs")
    before = -1
    while before != (before := server.backend.stats().generation_tokens):  # until the server's writes wait
        time.sleep(0.3)
    connection.close()
    server.until(lambda: not server.backend.live, "it has ended")
    assert server.backend.aborted


async def visit(server: Running, draw: random.Random) -> str:
    """One client: reads to the end, or leaves at a random moment."""
    leaves = draw.random() < 1 / 3
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": draw.randint(1, 20), "n": draw.choice([1, 1, 1, 2])}
    body |= {"stream": draw.random() < 0.7, "stop": draw.choice([None, "lazy", "jumps over"])}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        if leaves:
            try:
                await asyncio.wait_for(reader.read(), draw.random() * 0.05)
            except TimeoutError:
                writer.transport.abort()
                return "left"
            return "done"
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 200"), reply
        assert b"[DONE]" in reply or b'"finish_reason"' in reply
        return "done"
    finally:
        writer.close()


def test_a_third_of_a_thousand_clients_leaves(server: Running) -> None:
    visits = 1000
    backend = server.backend
    backend.first, backend.gap, backend.per_step = 0.004, 0.002, 2
    draw = random.Random(1)
    tasks_before = tasks(server)

    async def all_visits() -> list[str]:
        limit = asyncio.Semaphore(64)

        async def one(seed: int) -> str:
            async with limit:
                return await visit(server, random.Random(seed))

        return await asyncio.gather(*(one(draw.getrandbits(32)) for _ in range(visits)))

    outcomes = asyncio.run(all_visits())
    assert outcomes.count("left") > visits / 10
    server.until(lambda: not backend.live, "no block is in use")
    server.until(lambda: tasks(server) <= tasks_before, "no task is running")
    assert backend.stats().num_blocks_used == 0
    assert server.complete(max_tokens=3).status == 200


def tasks(server: Running) -> int:
    """Tasks of the server's event loop."""
    count = asyncio.run_coroutine_threadsafe(_count(), server.loop).result(30)
    return count


async def _count() -> int:
    return len(asyncio.all_tasks()) - 1
