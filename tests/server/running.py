"""The server as it runs for users, uvicorn and all, in a thread of the test's process; and a bare client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firsttoken.server.app import App
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import HttpServer, _loop_factory, bind, start_serving
from firsttoken.server.text import Tokenizer

from .models import EOS
from .scripted import ScriptedBackend


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; the last one, [DONE], as text."""
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"\n\n")
        datas = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n")[:-1]]
        assert datas[-1] == "[DONE]"
        return [json.loads(data) for data in datas[:-1]] + ["[DONE]"]


@dataclass
class Running:
    """A server on a free port of 127.0.0.1 over a scripted backend."""

    port: int
    backend: ScriptedBackend
    tokenizer: Tokenizer
    app: App
    loop: asyncio.AbstractEventLoop
    names: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Reply(response.status, _lower(response.headers), response.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, _lower(error.headers), error.read())

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, body, {"content-type": "application/json", **headers})

    def chat(self, **body: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | body)

    def complete(self, **body: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": "Hi"} | body)

    def open(self, path: str, body: Any, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection on which a POST has been sent."""
        data = json.dumps(body).encode()
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def says(self, text: str) -> None:
        """From now on every answer is this text."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        self.backend.answer = lambda request: tokens

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for what must come; the limit only ends a test that has failed."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            time.sleep(0.002)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@contextmanager
def running(folder: Path, config: ServerConfig | None = None, **backend_options: Any) -> Iterator[Running]:
    config = config or ServerConfig(port=0, dev_mode=True)
    tokenizer = Tokenizer(folder)
    vocab_size = tokenizer._tokenizer.get_vocab_size()
    backend = ScriptedBackend(answer=lambda request: [], eos=EOS, vocab_size=vocab_size, **backend_options)
    sock = bind(config)
    app = App(config)
    server = HttpServer(app, config)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        http = asyncio.create_task(server.serve(sockets=[sock]))
        app.serving = await start_serving(backend, config, folder, "scripted")
        ready.set()
        await http

    def main() -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(sock.getsockname()[1], backend, tokenizer, app, loops[0])
    finally:
        loops[0].call_soon_threadsafe(app.end_requests)
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
