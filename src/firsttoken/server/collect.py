"""Answers gathered to the end, for responses that are not streams."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from firsttoken.backends.base import BackendError
from firsttoken.engine.request import TokenLogprobs
from firsttoken.server.errors import unavailable
from firsttoken.server.generation import Answers
from firsttoken.server.serving import Serving


@dataclass(slots=True)
class Collected:
    """One whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


async def collect(serving: Serving, answers: Answers) -> list[Collected]:
    """All answers, in order of the choices. Raises ApiError 503 if the engine fails."""
    collected = [Collected() for _ in answers.choices]
    texts: list[list[str]] = [[] for _ in answers.choices]
    try:
        async with aclosing(answers.outputs(serving.backend)) as outputs:
            async for choice, delta in outputs:
                serving.metrics.observe_delta(delta)
                answer = collected[choice.index]
                texts[choice.index].append(delta.text)
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs
    except BackendError as error:
        raise unavailable(str(error)) from error
    for answer, parts in zip(collected, texts, strict=True):
        answer.text = "".join(parts)
    return collected
