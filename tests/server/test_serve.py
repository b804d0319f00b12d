"""`firsttoken serve` as a process, with the real engine in another: start, signals, and the errors before both."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from firsttoken.backends.base import BackendError
from firsttoken.engine.config import ConfigError
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import bind, serve

from .models import EOS, write_model, write_weights
from .scripted import ScriptedBackend

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "seed": 1}
LIMIT = 120


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(write_model(tmp_path_factory.mktemp("tiny") / "m"))


@contextmanager
def served(model: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """(address, process, lines of its output) of a server that is ready."""
    command = [sys.executable, "-m", "firsttoken", "serve", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    assert process.stdout is not None
    output = process.stdout
    reader = threading.Thread(target=lambda: lines.extend(iter(output.readline, "")))
    reader.start()
    try:
        until(lambda: any("address" in line for line in lines) or process.poll() is not None, "it is ready")
        assert process.poll() is None, "".join(lines)
        address = re.search(r"address\s+(http://\S+)", "".join(lines))
        assert address is not None
        yield address[1], process, lines
    finally:
        family = [process.pid, *(child.pid for child in children(process))]
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT)
        until(lambda: not any(map(alive, family)), "engine and server have ended")
        reader.join(LIMIT)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=LIMIT) as response:
        return json.load(response)


def test_a_whole_life(tiny_model: Path) -> None:
    with served(tiny_model, "--dtype", "float32", "--served-model-name", "tiny") as (url, process, lines):
        assert [line.split()[0] for line in lines] == [
            "firsttoken", "device", "KV", "speculation", "ready", "address", "try",
        ]  # fmt: skip
        assert urllib.request.urlopen(url + "/health", timeout=LIMIT).status == 200
        first = post(url + "/v1/chat/completions", CHAT | {"max_tokens": 40})
        again = post(url + "/v1/chat/completions", CHAT | {"max_tokens": 40})
        assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
        assert first["usage"]["completion_tokens"] == 40
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert first["model"] == "tiny"
        scored = post(
            url + "/v1/completions", {"prompt": "The quick", "max_tokens": 0, "echo": True, "logprobs": 2}
        )
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]
        # SIGTERM: the request that runs is answered to its end, then the process ends with 0.
        replies: list[Any] = []
        asking = threading.Thread(
            target=lambda: replies.append(post(url + "/v1/chat/completions", CHAT | {"max_tokens": 300}))
        )
        asking.start()
        metrics = url + "/metrics"
        until(
            lambda: (
                "running{" in (text := urllib.request.urlopen(metrics, timeout=LIMIT).read().decode())
                and re.search(r"num_requests_running\{.*\} 1", text) is not None
            ),
            "the request runs",
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
        asking.join(LIMIT)
        assert replies[0]["usage"]["completion_tokens"] == 300


def test_the_engine_is_killed(tiny_model: Path) -> None:
    with served(tiny_model, "--dtype", "float32") as (url, process, _):
        body = json.dumps(CHAT | {"max_tokens": 450, "stream": True}).encode()
        request = urllib.request.Request(url + "/v1/chat/completions", body)
        engine = max(children(process), key=lambda child: child.memory_info().rss)
        with urllib.request.urlopen(request, timeout=LIMIT) as stream:
            stream.readline()
            engine.kill()
            events = [line for line in stream.read().decode().split("\n") if line]
        assert events[-1] == "data: [DONE]"
        assert events[-2].startswith('data: {"error":{"message":')

        def health() -> int:
            try:
                return int(urllib.request.urlopen(url + "/health", timeout=LIMIT).status)
            except urllib.error.HTTPError as error:
                return error.code

        until(lambda: health() == 503, "its death is known")
        until(lambda: health() == 200, "it is back")
        assert post(url + "/v1/chat/completions", CHAT | {"max_tokens": 5})["usage"]["completion_tokens"] == 5


def scripted_serve(model_folder: Path, **options: Any) -> ScriptedBackend:
    return ScriptedBackend(answer=lambda request: [5] * 10_000, eos=EOS, vocab_size=400, **options)


SERVE_SCRIPTED = """
import sys
from pathlib import Path
from firsttoken.server.config import ServerConfig
from firsttoken.server.run import serve
from tests.server.test_serve import scripted_serve
folder = Path(sys.argv[1])
config = ServerConfig(port=0, drain_seconds=float(sys.argv[2]))
sys.exit(serve(config, folder, "m", lambda on_fatal: scripted_serve(folder, gap=0.05, start_seconds=float(sys.argv[3])),
    lambda line: print(line, flush=True)))
"""


@contextmanager
def scripted_process(folder: Path, drain: float, start: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_SCRIPTED, str(folder), str(drain), str(start)],
        stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": root},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT)
        assert process.stdout is not None
        process.stdout.close()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127.0.0.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("the server ended")


def open_stream(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
    body = json.dumps({"prompt": "x", "max_tokens": 3000, "stream": True}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert connection.recv(100)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


@pytest.mark.parametrize("ends_by", ["second signal", "drain limit"])
def test_signals_with_a_request_that_goes_on(model_folder: Path, ends_by: str) -> None:
    with scripted_process(model_folder, drain=0.5 if ends_by == "drain limit" else 600) as process:
        port = port_of(process)
        with open_stream(port) as stream:
            process.send_signal(signal.SIGTERM)

            def refuses() -> bool:
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", port)) != 0

            until(refuses, "no connection is taken any more")
            assert b'"text"' in stream.recv(1 << 16)  # but the open stream goes on
            if ends_by == "second signal":
                process.send_signal(signal.SIGTERM)
            data = read_all(stream)
        assert data.rstrip().endswith(b"data: [DONE]\n\n\r\n0") or b"shutting down" in data
        assert process.wait(LIMIT) == 0


def test_a_signal_while_the_model_is_loaded(model_folder: Path) -> None:
    with scripted_process(model_folder, drain=600, start=600) as process:
        until(lambda: bool(psutil.Process(process.pid).net_connections()), "it listens")
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0


def test_the_http_process_has_no_torch() -> None:
    """What the server's process imports holds no weights and starts at once."""
    code = (
        "import sys, firsttoken.server.run, firsttoken.backends.embedded, firsttoken.models, firsttoken.cli.serve;"
        "print([m for m in ('torch', 'transformers', 'fastapi', 'numpy.linalg') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def failing(config: ServerConfig, folder: Path, **options: Any) -> str:
    def make_backend(on_fatal: Callable[[str], None]) -> ScriptedBackend:
        return scripted_serve(folder, **options)

    with pytest.raises((ConfigError, BackendError)) as raised:
        serve(config, folder, "m", make_backend, lambda line: None)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_port_in_use_is_said_before_the_model_is_loaded(model_folder: Path) -> None:
    with bind(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        message = failing(ServerConfig(port=port), model_folder, start_seconds=600)
        assert f"port {port} on 127.0.0.1 is in use" in message
        assert "--port" in message
    assert "--host" in failing(ServerConfig(host="no.such.host.invalid"), model_folder)


def test_what_is_wrong_with_the_model_is_one_line(model_folder: Path, tmp_path: Path) -> None:
    assert "tokenizer.json" in failing(ServerConfig(port=0), tmp_path, start_seconds=600)
    config = ServerConfig(port=0, generation_config=str(tmp_path))
    assert "--generation-config" in failing(config, model_folder)
    error = ConfigError("too little memory: set --kv-cache-memory")
    assert failing(ServerConfig(port=0), model_folder, start_error=error) == str(error)


def test_unix_socket(model_folder: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    config = ServerConfig(uds=path)
    with bind(config) as taken:
        assert taken.getsockname() == path
        with pytest.raises(ConfigError, match="in use"):
            bind(config)
    bind(config).close()  # a socket that a killed server left behind is taken over


def test_defaults_from_generation_config(model_folder: Path, tmp_path: Path) -> None:
    from firsttoken.server.sampling import SamplingDefaults, load_sampling_defaults

    given = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    expected = SamplingDefaults(temperature=0.6, top_k=20, max_new_tokens=7)
    assert load_sampling_defaults("auto", tmp_path) == expected
    assert load_sampling_defaults(str(tmp_path), model_folder) == expected
    assert load_sampling_defaults("vllm", tmp_path) == SamplingDefaults()
    assert load_sampling_defaults("auto", model_folder) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match="temperature"):
        load_sampling_defaults("auto", tmp_path)
