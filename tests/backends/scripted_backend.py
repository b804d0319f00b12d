"""What the tests of the embedded backend share: one with a scripted engine, and ways to use and wait for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from firsttoken.backends.embedded import EmbeddedBackend
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import Request, RequestOutput, SamplingParams


def make_backend(*, script: dict[str, Any] | None = None, **kwargs: Any) -> EmbeddedBackend:
    """`script` holds the options of the scripted engine."""
    config = EngineConfig(model=json.dumps(script or {}))
    return EmbeddedBackend(config, engine_factory="tests.backends.scripted_engine:ScriptedEngine", **kwargs)


@asynccontextmanager
async def running_backend(**kwargs: Any) -> AsyncIterator[EmbeddedBackend]:
    backend = make_backend(**kwargs)
    try:
        await backend.start()
        yield backend
    finally:
        await backend.close()


def a_request(start: int, max_tokens: int = 5, request_id: str = "r", **kwargs: Any) -> Request:
    """Asks for start, start + 1, … or, below zero, for the trouble of that number."""
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=request_id, prompt_token_ids=[start], sampling=sampling, **kwargs)


async def outputs_of(backend: EmbeddedBackend, request: Request) -> list[RequestOutput]:
    return [output async for output in backend.generate(request)]


async def tokens_of(backend: EmbeddedBackend, request: Request) -> list[int]:
    return [token for output in await outputs_of(backend, request) for token in output.token_ids]


async def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Waits for something that must come; the limit is only there to end a test that has failed."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {limit_s:g} s in vain until {what}") from None
