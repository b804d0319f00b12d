"""The life of one generation request: body, prompt, engine, answer; aborted wherever the client leaves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firsttoken.server.chat import ChatChunks, chat_answers, chat_response
from firsttoken.server.collect import Collected, collect
from firsttoken.server.completions import CompletionChunks, completion_answers, completion_response
from firsttoken.server.generation import Answers, Times
from firsttoken.server.http import Connection
from firsttoken.server.schemas import ChatRequest, CompletionRequest, parse_body
from firsttoken.server.serving import Serving
from firsttoken.server.streaming import Chunks, EventFrame, encode, send_stream

INLINE_BODY = 16 * 1024
"""Bytes. Larger bodies are read and tokenised in a thread, so that other streams go on meanwhile; for smaller
ones the way to a thread and back would take longer than it saves them (4k tokens are some 3 ms)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What differs between the two generation routes."""

    body: type[ChatRequest] | type[CompletionRequest]
    id_prefix: str
    object: str
    chunk_object: str
    answers: Callable[[Serving, Any, Times], Answers]
    chunks: Callable[[Serving, Any, Answers, EventFrame], Chunks]
    response: Callable[[Serving, Any, Answers, list[Collected]], dict[str, Any]]


CHAT = Endpoint(
    body=ChatRequest,
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    answers=chat_answers,
    chunks=ChatChunks,
    response=chat_response,
)
COMPLETIONS = Endpoint(
    body=CompletionRequest,
    id_prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
    answers=completion_answers,
    chunks=CompletionChunks,
    response=completion_response,
)


async def generate(connection: Connection, serving: Serving, endpoint: Endpoint, body_limit: int) -> None:
    body = await connection.body(body_limit)
    times = Times(connection.arrival)

    def prepare() -> tuple[Any, Answers]:
        request = parse_body(body, endpoint.body)
        serving.check_model(request.model)
        serving.check_alive()
        return request, endpoint.answers(serving, request, times)

    async with connection.abort_on_disconnect():
        request, answers = prepare() if len(body) <= INLINE_BODY else await asyncio.to_thread(prepare)
        try:
            await _answer(connection, serving, endpoint, request, answers)
        finally:
            _observe(serving, answers)


async def _answer(
    connection: Connection, serving: Serving, endpoint: Endpoint, request: Any, answers: Answers
) -> None:
    head = {
        "id": endpoint.id_prefix + connection.request_id,
        "object": endpoint.chunk_object if request.stream else endpoint.object,
        "created": int(time.time()),
        "model": serving.names[0],
    }
    if request.stream:
        options = request.stream_options
        include_usage = options is not None and options.include_usage
        frame = EventFrame(answers, head, include_usage, include_usage and options.continuous_usage_stats)
        await send_stream(
            connection, serving, answers, endpoint.chunks(serving, request, answers, frame), frame
        )
    else:
        collected = await collect(serving, answers)
        response = head | endpoint.response(serving, request, answers, collected)
        await connection.respond(200, encode(response), headers=[answers.times.header()])


def _observe(serving: Serving, answers: Answers) -> None:
    metrics, times = serving.metrics, answers.times
    if times.first_token is not None:
        metrics.observe_request(answers.prompt_tokens, times.parts())
    for choice in answers.choices:
        last = None if choice.last_output is None else choice.last_output - times.arrival
        metrics.observe_answer(choice.finish_reason or "abort", choice.num_tokens, choice.first_seconds, last)
