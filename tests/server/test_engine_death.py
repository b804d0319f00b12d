"""The engine dies: every open stream ends with an error, and the server answers again when it is back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firsttoken.engine.request import Request, RequestOutput

from .running import Reply, Running, running
from .test_streaming import receive_until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def dies(server: Running) -> None:
    server.loop.call_soon_threadsafe(server.backend.die, "the engine was killed by signal 9")
    server.until(lambda: not server.backend.healthy, "the engine is dead")


def test_open_streams_and_new_requests(model_folder: Path) -> None:
    with running(model_folder) as server:
        server.says("word " * 1000)
        server.backend.gap = 0.02
        streams = [server.open("/v1/chat/completions", CHAT | {"stream": True, "n": n}) for n in (1, 1, 3)]
        begun = [receive_until(stream, b'"content":"') for stream in streams]
        server.backend.stopped = True
        silent = server.open("/v1/chat/completions", CHAT | {"stream": True})
        whole = server.open("/v1/chat/completions", CHAT)
        server.until(lambda: len(server.backend.live) == 7, "all requests run")
        dies(server)
        for stream, data in zip(streams, begun, strict=True):
            data = data + receive_until(stream, b"0\r\n\r\n")
            events = [line for line in data.decode().split("\n") if line.startswith("data: ")]
            assert events[-1] == "data: [DONE]"
            assert events[-2].startswith('data: {"error":{"message":"the engine was killed by signal 9"')
        for connection in (silent, whole):  # nothing had been sent: the status can say it
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
            connection.close()
        for reply in (server.request("GET", "/health"), server.chat(), server.chat(stream=True)):
            assert reply.status == 503
            assert reply.headers["retry-after"] == "1"
            assert reply.error["type"] == "server_error"
        assert "firsttoken:engine_up{" in server.request("GET", "/metrics").body.decode()
        server.backend.stopped = False
        server.backend.revive()
        server.says("back")
        assert server.request("GET", "/health").status == 200
        assert server.chat().json["choices"][0]["message"]["content"] == "back"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_alone(server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(request: Request) -> Any:
        yield RequestOutput(
            request_id=request.request_id, finish_reason="error", error="its numbers were not finite"
        )

    monkeypatch.setattr(server.backend, "generate", generate)
    reply: Reply = server.chat(stream=stream)
    assert reply.status == 503
    assert "not finite" in reply.error["message"]


def test_a_bug_is_an_answer_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception nobody thought of ends its own request, in the API's shape, and the connection is reusable."""

    def broken() -> bytes:
        raise RuntimeError("oops")

    assert server.app.serving is not None
    monkeypatch.setattr(type(server.app.serving.metrics), "render", lambda self: broken())
    reply = server.request("GET", "/metrics")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "oops" not in reply.error["message"]
