"""/v1/chat/completions: messages → a prompt → answers in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from firsttoken.engine.request import TokenLogprobs
from firsttoken.server.collect import Collected
from firsttoken.server.errors import bad_request
from firsttoken.server.generation import Answers, Choice, Delta, Times
from firsttoken.server.logprobs import chat_logprobs, prompt_logprobs
from firsttoken.server.schemas import ChatRequest, TokenizeRequest
from firsttoken.server.serving import Serving
from firsttoken.server.streaming import EventFrame, encode

_TEXT_PART_TYPES = ("text", "input_text", "output_text")


def chat_prompt(serving: Serving, request: ChatRequest | TokenizeRequest, times: Times) -> list[int]:
    """The token ids of the rendered conversation. Raises ApiError 400."""
    template = serving.text.template
    if template is None:
        raise bad_request(
            "This model has no chat template: use /v1/completions, or serve with --chat-template."
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other: set the latter to false.",
            "continue_final_message",
            "invalid_value",
        )
    start = time.perf_counter()
    text = template.render(
        check_messages(request.messages or []),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=request.chat_template_kwargs,
    )
    rendered = time.perf_counter()
    tokenizer = serving.text.tokenizer
    ids = tokenizer.encode(text) if request.add_special_tokens else tokenizer.encode_chat(text)
    times.template = rendered - start
    times.tokenize = time.perf_counter() - rendered
    return ids


def check_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages fit for a template: a role each, contents of text alone, tool calls with parsed arguments."""
    checked = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise bad_request(
                f"messages[{i}].role is required and must be a text.", "messages", "invalid_value"
            )
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_text_part(part, i, j) for j, part in enumerate(content)]}
        elif content is not None and not isinstance(content, str):
            raise bad_request(
                f"messages[{i}].content must be a text or a list of text parts.", "messages", "invalid_value"
            )
        if message.get("tool_calls") is not None:
            message = {**message, "tool_calls": _tool_calls(message["tool_calls"], i)}
        checked.append(message)
    return checked


def _text_part(part: Any, i: int, j: int) -> dict[str, str]:
    where = f"messages[{i}].content[{j}]"
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"{where} must be an object with a type.", "messages", "invalid_value")
    if part["type"] not in _TEXT_PART_TYPES:
        raise bad_request(
            f"{where}: {part['type'][:32]!r} is not supported; this server takes text only.",
            "messages",
            "unsupported_content",
        )
    if not isinstance(part.get("text"), str):
        raise bad_request(f"{where}.text is required and must be a text.", "messages", "invalid_value")
    return {"type": "text", "text": part["text"]}


def _tool_calls(calls: Any, i: int) -> list[dict[str, Any]]:
    """Earlier tool calls in a conversation: their arguments as objects, which is what templates expect."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise bad_request(
            f"messages[{i}].tool_calls must be a list of objects with a function.",
            "messages",
            "invalid_value",
        )
    parsed = []
    for call in calls:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            # Strictly: what it refuses (NaN, half of a surrogate pair) stays the text that the client sent.
            with suppress(msgspec.MsgspecError, RecursionError):
                function = {**function, "arguments": msgspec.json.decode(function["arguments"])}
        parsed.append({**call, "function": function})
    return parsed


def chat_answers(serving: Serving, request: ChatRequest, times: Times) -> Answers:
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs: only with logprobs: true.", "top_logprobs", "invalid_value")
    limits = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            "max_tokens and max_completion_tokens are two names of one limit and differ: send one.",
            "max_tokens",
            "invalid_value",
        )
    return serving.answers(
        request,
        [chat_prompt(serving, request, times)],
        times,
        max_tokens=limits.pop() if limits else None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )


class ChatChunks:
    """Stream: a chunk with the role and empty content together with the first token, never before it; content
    chunks; a chunk with the finish reason."""

    def __init__(self, serving: Serving, request: ChatRequest, answers: Answers, frame: EventFrame) -> None:
        self._tokenizer = serving.text.tokenizer
        self._request = request
        self._frame = frame
        self._begun: set[int] = set()
        self._prompt_ids = b""
        if request.return_token_ids:
            self._prompt_ids = b',"prompt_token_ids":' + encode(answers.requests[0].prompt_token_ids)

    def events(self, choice: Choice, delta: Delta) -> bytes:
        request, frame, index = self._request, self._frame, choice.index
        logprobs, token_ids = b"null", b""
        if request.logprobs and delta.logprobs:
            logprobs = encode(
                chat_logprobs(delta.logprobs, self._tokenizer, request.return_tokens_as_token_ids)
            )
        if request.return_token_ids and delta.token_ids:
            token_ids = b',"token_ids":' + encode(delta.token_ids)
        says = bool(delta.text or token_ids or logprobs != b"null")
        if not says and delta.finish_reason is None:
            return b""
        data = b""
        if index not in self._begun:
            role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            data = frame.event(index, role, self._prompt_ids if not self._begun else b"")
            self._begun.add(index)
        if says:
            data += frame.event(
                index,
                b',"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b'
                % (encode(delta.text), logprobs, token_ids),
            )
        if delta.finish_reason is not None:
            rest = b',"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b'
            data += frame.event(index, rest % (encode(delta.finish_reason), encode(choice.stop_reason)))
        return data


def chat_response(
    serving: Serving, request: ChatRequest, answers: Answers, collected: list[Collected]
) -> dict[str, Any]:
    """The fields of the answer after id, object, created and model."""
    tokenizer = serving.text.tokenizer
    choices = []
    for choice, answer in zip(answers.choices, collected, strict=True):
        entries: list[TokenLogprobs] = answer.logprobs
        choices.append(
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": chat_logprobs(entries, tokenizer, request.return_tokens_as_token_ids)
                if request.logprobs
                else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            | ({"token_ids": answer.token_ids} if request.return_token_ids else {})
        )
    response: dict[str, Any] = {"choices": choices, "usage": answers.usage()}
    if request.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(answers.prompt_logprobs.get(0, []), tokenizer)
    if request.return_token_ids:
        response["prompt_token_ids"] = answers.requests[0].prompt_token_ids
    return response
