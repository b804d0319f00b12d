"""The engine itself behind the process boundary: a tiny model, the same tokens as in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from firsttoken.backends.base import BackendError
from firsttoken.backends.embedded import EmbeddedBackend, RestartPolicy
from firsttoken.backends.factory import create_engine
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.request import Request, SamplingParams

from ..server.models import write_model, write_weights
from .scripted_backend import outputs_of, tokens_of, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(write_model(tmp_path_factory.mktemp("tiny") / "m"))


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), dtype="float32", max_num_seqs=4, max_model_len=128)


def a_request(i: int, **sampling: object) -> Request:
    """Request i has its own prompt and seed."""
    params = {"max_tokens": 24, "seed": i, "ignore_eos": True, **sampling}
    prompt = [10 + i, *range(20, 60)]
    return Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=SamplingParams(**params))  # type: ignore[arg-type]


async def test_the_same_tokens_as_without_a_process_between_and_after_a_death(model: Path) -> None:
    engine = create_engine(config(model))
    requests = [a_request(i) for i in range(6)]
    alone = [
        [token for output in engine.stream(r.prompt_token_ids, r.sampling) for token in output.token_ids]
        for r in requests
    ]
    backend = EmbeddedBackend(config(model), restart=RestartPolicy(backoff_s=0.01))
    try:
        await backend.start()
        assert await asyncio.gather(*(tokens_of(backend, r) for r in requests)) == alone
        assert backend.stats().num_blocks_used == 0
        assert await backend.reset_prefix_cache()

        stream = backend.generate(a_request(0, max_tokens=80))
        await anext(stream)
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(BackendError, match="SIGKILL"):
            async for _ in stream:
                pass
        await until(lambda: backend.healthy, "the engine is up again")
        assert await asyncio.gather(*(tokens_of(backend, r) for r in requests)) == alone

        changed = await backend.reconfigure({"enable_prefix_caching": False, "speculation": "off"})
        assert changed["enable_prefix_caching"] is False
        for _ in range(2):
            outputs = await outputs_of(backend, requests[0])
            assert outputs[0].num_cached_tokens == 0
            assert [token for output in outputs for token in output.token_ids] == alone[0]
            assert outputs[-1].timing is not None
            assert outputs[-1].timing.first_decode is not None

        (refused,) = await outputs_of(backend, a_request(0, logit_bias={1 << 20: 1.0}))
        assert refused.finish_reason == "error"
        assert "vocabulary" in (refused.error or "")
    finally:
        await backend.close()


async def test_what_cannot_work_is_one_line_of_the_engine(tmp_path: Path) -> None:
    backend = EmbeddedBackend(EngineConfig(model=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError) as caught:
        await backend.start()
    assert "\n" not in str(caught.value)
    assert "nowhere" in str(caught.value)
