"""The embedded backend against a real engine process: streams, aborts, slow readers, calls."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest
import uvloop

from firsttoken.backends.base import BackendError, EngineStats
from firsttoken.backends.embedded import EmbeddedBackend, add_counters
from firsttoken.backends.process import available_cores, engine_environment
from firsttoken.backends.wire import WireError
from firsttoken.engine.config import ConfigError, EngineConfig

from .scripted_backend import a_request, make_backend, outputs_of, running_backend, tokens_of, until
from .scripted_engine import FAIL_ALONE, REFUSE


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_life_on_both_event_loops(loop_factory: object) -> None:
    async def life() -> None:
        stages: list[tuple[str, float]] = []
        async with running_backend(on_progress=lambda *stage: stages.append(stage)) as backend:
            assert backend.healthy
            assert [stage for stage, _ in stages] == ["spawn", "import", "load", "warmup"]
            assert backend.info.startup == dict(stages)
            assert backend.info.model == "scripted"
            assert backend.stats().num_blocks_total == 256, "numbers are there from the start"
            outputs = await outputs_of(backend, a_request(10))
            assert [token for output in outputs for token in output.token_ids] == [10, 11, 12, 13, 14]
            assert all(output.request_id == "r" for output in outputs)
            assert outputs[0].num_cached_tokens == 0
            assert outputs[-1].finish_reason == "length"
        assert not backend.healthy
        with pytest.raises(BackendError, match="closed"):
            await tokens_of(backend, a_request(0))

    with asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        runner.run(life())


async def test_many_requests_at_once_each_get_their_own_tokens_in_order() -> None:
    async with running_backend() as backend:
        lengths = [1 + i % 40 for i in range(200)]
        answers = await asyncio.gather(
            *(tokens_of(backend, a_request(1000 * i, length, f"r{i}")) for i, length in enumerate(lengths))
        )
        assert answers == [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate(lengths)]
        stats = backend.stats()
        assert (stats.num_running, stats.generation_tokens) == (0, sum(lengths))
        assert stats.finished == {"length": 200}


async def test_requests_that_share_an_id_keep_their_streams_apart() -> None:
    async with running_backend() as backend:
        same = [tokens_of(backend, a_request(start, 20, "same")) for start in (0, 100)]
        assert await asyncio.gather(*same) == [list(range(20)), list(range(100, 120))]


async def aborted(backend: EmbeddedBackend, count: int = 1) -> None:
    await until(lambda: backend.stats().finished.get("abort", 0) == count, "the engine has aborted it")
    assert backend.stats().num_running == 0


async def test_closing_a_stream_early_aborts_its_request() -> None:
    async with running_backend(script={"step_s": 0.001}) as backend:
        stream = backend.generate(a_request(0, 1_000_000))
        async for _ in stream:
            break
        await stream.aclose()
        await aborted(backend)


async def test_cancelling_the_reader_aborts_its_request() -> None:
    async with running_backend(script={"step_s": 0.001}) as backend:
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in backend.generate(a_request(0, 1_000_000)):
                seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await aborted(backend)


async def test_cancelling_before_the_first_output_aborts_the_request() -> None:
    async with running_backend(script={"step_s": 0.3}) as backend:
        task = asyncio.create_task(tokens_of(backend, a_request(0, 1_000_000)))
        await until(lambda: backend.stats().num_running == 1 or backend._submitted == 1, "it is submitted")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await aborted(backend)


async def test_a_stream_that_is_never_read_is_never_submitted() -> None:
    async with running_backend() as backend:
        stream = backend.generate(a_request(0))
        await stream.aclose()
        assert await tokens_of(backend, a_request(5, 1)) == [5]
        assert backend.stats().finished == {"length": 1}


async def test_abort_ends_the_stream_and_the_request() -> None:
    async with running_backend(script={"step_s": 0.001}) as backend:
        other = asyncio.create_task(tokens_of(backend, a_request(0, 300, "other")))
        outputs = []
        async for output in backend.generate(a_request(0, 1_000_000, "long")):
            outputs.append(output)
            await backend.abort("long")
            await backend.abort("long")
            await backend.abort("unknown")
        assert outputs[-1].finish_reason == "abort"
        assert await other == list(range(300))
        await aborted(backend)


async def test_a_slow_reader_gets_everything_and_delays_nobody() -> None:
    async with running_backend() as backend:
        slow = backend.generate(a_request(0, 400, "slow"))
        first = await anext(slow)
        # While nobody reads the slow stream, others come and go.
        for i in range(3):
            assert await tokens_of(backend, a_request(0, 200, f"fast{i}")) == list(range(200))
        await until(lambda: backend.stats().num_running == 0, "the slow one's request has ended too")
        rest = [output async for output in slow]
        assert first.token_ids + [token for output in rest for token in output.token_ids] == list(range(400))
        assert len(rest) == 1, "what waited is one output"


async def test_an_error_of_one_request_is_its_own() -> None:
    async with running_backend(script={"step_s": 0.001}) as backend:
        good = asyncio.create_task(tokens_of(backend, a_request(7, 50, "good")))
        (alone,) = await outputs_of(backend, a_request(FAIL_ALONE))
        assert (alone.finish_reason, alone.error) == ("error", "only this one failed")
        (refused,) = await outputs_of(backend, a_request(REFUSE))
        assert (refused.finish_reason, refused.error) == ("error", "the prompt is refused")
        with pytest.raises(WireError):
            await outputs_of(backend, a_request(0, cache_salt="\ud800"))
        assert await good == list(range(7, 57))
        assert backend.healthy


async def test_calls_are_answered_between_steps() -> None:
    async with running_backend(script={"step_s": 0.001}) as backend:
        assert await backend.reset_prefix_cache() is True
        stream = backend.generate(a_request(0, 1_000_000))
        await anext(stream)
        assert await backend.reset_prefix_cache() is False
        await stream.aclose()
        assert await backend.reconfigure({"max_num_seqs": 3}) == {"max_num_seqs": 3}
        assert backend.info.settings == {"max_num_seqs": 3}
        with pytest.raises(ConfigError, match=r"^max_num_seqs must be at least 1$"):
            await backend.reconfigure({"max_num_seqs": 0})
        assert backend.healthy


async def test_the_arrival_time_is_when_the_server_took_the_request() -> None:
    async with running_backend() as backend:
        request = a_request(0)
        before = time.monotonic()
        await tokens_of(backend, request)
        assert request.arrival_time == 0.0, "the caller's request is left alone"
        assert before <= time.monotonic()


async def test_nothing_is_left_behind() -> None:
    me = psutil.Process()
    async with running_backend():
        pass  # the first use opens what stays open: the loop's own descriptors
    files, children = me.num_fds(), me.children()
    for _ in range(3):
        backend = make_backend(script={"step_s": 0.001})
        await backend.start()
        stream = backend.generate(a_request(0, 1_000_000))
        await anext(stream)
        await asyncio.gather(backend.close(), backend.close())
        await backend.close()
        with pytest.raises(BackendError, match="closed"):
            async for _ in stream:
                pass
    with pytest.raises(ConfigError):
        await make_backend(script={"load_error": "config"}).start()
    assert me.num_fds() == files
    assert me.children() == children
    assert len(asyncio.all_tasks()) == 1


def test_the_user_has_the_last_word_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    environment = engine_environment(EngineConfig(num_threads=3))
    assert (environment["OMP_NUM_THREADS"], environment["GOMP_SPINCOUNT"]) == ("3", "7")
    assert engine_environment(EngineConfig())["OMP_NUM_THREADS"] == str(available_cores())


def test_counters_of_earlier_runs_are_added_and_gauges_are_not() -> None:
    earlier = EngineStats(
        num_running=3, steps=5, finished={"stop": 1, "abort": 2}, accepted_tokens_per_pos=[4, 1]
    )
    now = EngineStats(num_running=1, steps=2, finished={"stop": 3}, accepted_tokens_per_pos=[1])
    assert add_counters(now, earlier) == EngineStats(
        num_running=1, steps=7, finished={"stop": 4, "abort": 2}, accepted_tokens_per_pos=[5, 1]
    )
