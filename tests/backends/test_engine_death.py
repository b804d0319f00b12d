"""Engines that die, hang or never start, and servers that do: real processes, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from firsttoken.backends.base import BackendError
from firsttoken.backends.embedded import RestartPolicy

from .scripted_backend import a_request, make_backend, running_backend, tokens_of, until
from .scripted_engine import CRASH, EXIT, HANG, RAISE

AT_ONCE = RestartPolicy(backoff_s=0.01)


def kill_engine(backend: object, number: int = signal.SIGKILL) -> None:
    os.kill(backend.pid, number)  # type: ignore[attr-defined]


async def test_killing_the_engine_ends_every_stream_and_it_recovers() -> None:
    async with running_backend(script={"step_s": 0.001}, restart=AT_ONCE) as backend:
        streams = [backend.generate(a_request(1000 * i, 1_000_000, f"r{i}")) for i in range(5)]
        for stream in streams:
            await anext(stream)
        await until(lambda: backend.stats().generation_tokens > 0, "a snapshot has come")
        made = backend.stats().generation_tokens
        kill_engine(backend)
        for stream in streams:
            with pytest.raises(BackendError, match=r"^the engine process was killed by SIGKILL$"):
                async for _ in stream:
                    pass
        assert not backend.healthy
        with pytest.raises(BackendError, match="SIGKILL"):
            await tokens_of(backend, a_request(0))
        with pytest.raises(BackendError, match="SIGKILL"):
            await backend.reset_prefix_cache()
        await until(lambda: backend.healthy, "the engine is up again")
        assert await tokens_of(backend, a_request(7)) == [7, 8, 9, 10, 11]
        assert backend.stats().generation_tokens >= made + 5, "counters go on"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (RAISE, r"failed \(exit code 1\): RuntimeError: the step went wrong$"),
        (CRASH, r"killed by SIGSEGV"),
        (EXIT, r"ended with exit code 7: the last words$"),
    ],
    ids=["raise", "crash", "exit"],
)
async def test_the_reason_of_a_death_is_one_line(
    trouble: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_backend(script={"step_s": 0.001}, restart=AT_ONCE) as backend:
        bystander = backend.generate(a_request(0, 1_000_000, "bystander"))
        await anext(bystander)
        with pytest.raises(BackendError, match=reason) as caught:
            await tokens_of(backend, a_request(trouble))
        assert "\n" not in str(caught.value)
        with pytest.raises(BackendError, match=reason):
            async for _ in bystander:
                pass
        await until(lambda: backend.healthy, "the engine is up again")
    log = capsys.readouterr().err
    assert ("Traceback" in log) == (trouble == RAISE)
    if trouble == CRASH:
        assert "in step" in log, "faulthandler says where"


async def test_an_engine_that_hangs_is_ended_with_a_look_at_where(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_backend(restart=AT_ONCE, hang_timeout_s=3.0) as backend:
        with pytest.raises(BackendError, match=r"^the engine made no step for 3 s and was ended$"):
            await tokens_of(backend, a_request(HANG))
        assert not backend.healthy
        await until(lambda: backend.healthy, "the engine is up again")
        assert await tokens_of(backend, a_request(1, 1)) == [1]
    assert "in _misbehave" in capsys.readouterr().err


async def test_an_engine_that_keeps_dying_is_given_up() -> None:
    fatal: list[str] = []
    policy = RestartPolicy(max_restarts=2, backoff_s=0.01)
    async with running_backend(restart=policy, on_fatal=fatal.append) as backend:
        for _ in range(3):
            await until(lambda: backend.healthy, "it is up")
            assert not fatal
            with pytest.raises(BackendError):
                await tokens_of(backend, a_request(EXIT))
        await until(lambda: bool(fatal), "it is given up")
        assert fatal == ["the engine process ended with exit code 7: the last words"]
        assert not backend.healthy
        with pytest.raises(BackendError, match="exit code 7"):
            await tokens_of(backend, a_request(0))


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    flag = tmp_path / "fail"
    async with running_backend(script={"fail_once": str(flag)}, restart=AT_ONCE) as backend:
        flag.touch()
        kill_engine(backend)
        await until(lambda: not flag.exists() and backend.healthy, "the second try is up")
        assert await tokens_of(backend, a_request(3, 1)) == [3]


async def test_settings_changed_at_run_time_outlive_a_restart() -> None:
    async with running_backend(restart=AT_ONCE) as backend:
        await backend.reconfigure({"max_num_seqs": 3})
        kill_engine(backend)
        await until(lambda: not backend.healthy, "it is down")
        await until(lambda: backend.healthy, "it is up again")
        assert backend.info.settings == {"max_num_seqs": 3}


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ({"load_error": "config"}, "ConfigError", "no model in /nowhere: name a folder that exists"),
        ({"load_error": "bug"}, "BackendError", "RuntimeError: a bug in two lines"),
        ({"load_error": "crash"}, "BackendError", "ended with exit code 9: out of luck"),
    ],
    ids=["config", "bug", "crash"],
)
async def test_an_engine_that_cannot_start_says_why_in_one_line(
    script: dict[str, str], error: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = make_backend(script=script)
    with pytest.raises(Exception, match=message) as caught:
        await backend.start()
    assert type(caught.value).__name__ == error
    assert "\n" not in str(caught.value)
    assert not backend.healthy
    assert ("Traceback" in capsys.readouterr().err) == (script["load_error"] == "bug")
    await backend.close()


async def test_an_engine_that_is_not_there_is_an_error() -> None:
    backend = make_backend()
    backend._engine_factory = "no_such_module:Engine"
    with pytest.raises(BackendError, match="ModuleNotFoundError"):
        await backend.start()


async def test_cancelling_the_start_ends_the_process() -> None:
    backend = make_backend(script={"load_s": 600})
    start = asyncio.create_task(backend.start())
    await until(lambda: backend.pid is not None, "the process is there")
    process = psutil.Process(backend.pid)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not process.is_running()


async def test_closing_while_the_engine_restarts() -> None:
    backend = make_backend(restart=RestartPolicy(backoff_s=600))
    await backend.start()
    kill_engine(backend)
    await until(lambda: not backend.healthy, "it is down")
    await backend.close()
    assert len(asyncio.all_tasks()) == 1


async def test_signals_to_the_group_are_left_to_the_server() -> None:
    async with running_backend() as backend:
        kill_engine(backend, signal.SIGINT)
        kill_engine(backend, signal.SIGTERM)
        assert await tokens_of(backend, a_request(4, 1)) == [4]


# -- the server's own death: it must be a process of its own -------------------------------------------------

SERVER = """
import asyncio, contextlib, json, sys
from tests.backends.scripted_backend import a_request, running_backend

async def serve(script):
    async with running_backend(script=script) as backend:
        print(json.dumps({"engine": backend.pid}), flush=True)
        streams = [backend.generate(a_request(10_000 * i, 1500, f"r{i}")) for i in range(40)]
        async def read(stream):
            return [token async for output in stream for token in output.token_ids]
        answers = await asyncio.gather(*map(read, streams))
        right = [list(range(10_000 * i, 10_000 * i + 1500)) for i in range(40)]
        print(json.dumps({"right": answers == right}), flush=True)
        await asyncio.sleep(600)

with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(serve(json.loads(sys.argv[1])))
"""

LOADING = """
import asyncio, json
from tests.backends.scripted_backend import make_backend

async def serve():
    backend = make_backend(script={"load_s": 600})
    start = asyncio.create_task(backend.start())
    while backend.pid is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # the interpreter is up and in the constructor of the engine
    print(json.dumps({"engine": backend.pid}), flush=True)
    await start

asyncio.run(serve())
"""

StartServer = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_server(request: pytest.FixtureRequest) -> StartServer:
    def start(code: str, script: dict[str, object] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(script or {})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

        def end() -> None:
            process.kill()
            process.communicate()

        request.addfinalizer(end)
        return process

    return start


def told(server: subprocess.Popen[str]) -> dict[str, object]:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, server.communicate()[1]
    told: dict[str, object] = json.loads(line)
    return told


def gone(pid: object) -> bool:
    """Ended, or waiting for init to notice."""
    assert isinstance(pid, int)
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("code", [SERVER, LOADING], ids=["streaming", "loading"])
async def test_the_engine_does_not_outlive_a_killed_server(code: str, start_server: StartServer) -> None:
    server = start_server(code, {"step_s": 0.01})
    engine = told(server)["engine"]
    assert not gone(engine)
    server.kill()
    await until(lambda: gone(engine), "the engine has ended")


async def test_a_stopped_server_stops_no_step_and_loses_no_token(
    start_server: StartServer, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    server = start_server(SERVER, {"step_s": 0.0005, "step_log": str(steps)})
    told(server)
    await until(lambda: steps.exists() and steps.stat().st_size > 20, "it streams")
    server.send_signal(signal.SIGSTOP)
    await until(lambda: steps.stat().st_size >= 1500, "the engine has finished everything by itself")
    server.send_signal(signal.SIGCONT)
    assert told(server) == {"right": True}


async def test_ctrl_c_in_a_terminal_prints_nothing_from_the_engine(start_server: StartServer) -> None:
    server = start_server(SERVER)
    engine = told(server)["engine"]
    assert told(server) == {"right": True}
    os.killpg(server.pid, signal.SIGINT)
    _, log = server.communicate(timeout=60)
    assert log == ""
    await until(lambda: gone(engine), "the engine has ended")
