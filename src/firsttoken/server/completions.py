"""/v1/completions: prompts as text or token ids → answers in OpenAI's older shape, with echo and logprobs."""

from __future__ import annotations

import time
from typing import Any

from firsttoken.engine.request import TokenLogprobs
from firsttoken.server.collect import Collected
from firsttoken.server.errors import ApiError, bad_request
from firsttoken.server.generation import Answers, Choice, Delta, Times
from firsttoken.server.logprobs import completion_logprobs, prompt_logprobs
from firsttoken.server.schemas import CompletionRequest
from firsttoken.server.serving import Serving
from firsttoken.server.streaming import EventFrame, encode

MAX_ANSWERS = 4096
"""Prompts x n of one request."""
DEFAULT_MAX_TOKENS = 16


def completion_prompts(serving: Serving, request: CompletionRequest, times: Times) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError 400."""
    prompt = request.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(_is_token(item) for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise bad_request("prompt: the list is empty.", "prompt", "invalid_value")
    if len(prompts) * request.n > MAX_ANSWERS:
        raise bad_request(f"prompt: prompts x n may be at most {MAX_ANSWERS}.", "prompt", "invalid_value")
    start = time.perf_counter()
    ids = [_prompt_ids(serving, request, item, i) for i, item in enumerate(prompts)]
    times.tokenize = time.perf_counter() - start
    return ids


def _prompt_ids(serving: Serving, request: CompletionRequest, prompt: Any, i: int) -> list[int]:
    if isinstance(prompt, str):
        ids = serving.text.tokenizer.encode(prompt, request.add_special_tokens)
    elif isinstance(prompt, list) and all(_is_token(item) for item in prompt):
        ids = prompt
        vocab_size = serving.backend.info.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise bad_request(
                f"prompt: token ids of this model are 0 to {vocab_size - 1}.", "prompt", "invalid_value"
            )
    else:
        raise _bad_prompt()
    if not ids:
        raise bad_request(f"prompt: prompt {i} has no tokens.", "prompt", "invalid_value")
    return ids


def _is_token(item: Any) -> bool:
    return type(item) is int


def _bad_prompt() -> ApiError:
    return bad_request(
        "prompt: expected a text, a list of texts, a list of token ids, or a list of such lists.",
        "prompt",
        "invalid_value",
    )


def completion_answers(serving: Serving, request: CompletionRequest, times: Times) -> Answers:
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens: 0 is possible only with echo.", "max_tokens", "invalid_value")
    if request.echo and request.stream and request.logprobs is not None:
        raise bad_request("logprobs: with echo only without stream.", "logprobs", "invalid_value")
    prompts = completion_prompts(serving, request, times)
    asked = [
        k for k in (request.prompt_logprobs, request.logprobs if request.echo else None) if k is not None
    ]
    max_tokens = request.max_tokens
    if max_tokens is None:
        longest = max(map(len, prompts))
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, serving.backend.info.max_model_len - longest))
    answers = serving.answers(
        request,
        prompts,
        times,
        max_tokens=max(1, max_tokens),  # a prompt is scored by the step that would make its first token
        logprobs=request.logprobs if max_tokens else None,
        prompt_logprobs=max(asked) if asked else None,
    )
    if max_tokens == 0:
        for choice in answers.choices:
            choice.only_prompt = True
    return answers


def _prompt_text(serving: Serving, request: CompletionRequest, answers: Answers, choice: Choice) -> str:
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    of_choice = prompt[choice.index // request.n]
    if isinstance(of_choice, str):
        return of_choice
    ids = answers.requests[choice.index].prompt_token_ids
    return serving.text.tokenizer.decode(ids, request.skip_special_tokens)


class CompletionChunks:
    """Stream: chunks of text, the last with the finish reason; with echo the first begins with the prompt."""

    def __init__(
        self, serving: Serving, request: CompletionRequest, answers: Answers, frame: EventFrame
    ) -> None:
        self._serving = serving
        self._request = request
        self._answers = answers
        self._frame = frame
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def events(self, choice: Choice, delta: Delta) -> bytes:
        request, index = self._request, choice.index
        text, logprobs, token_ids = delta.text, b"null", b""
        if request.logprobs is not None and delta.logprobs:
            shaped, self._offsets[index] = completion_logprobs(
                delta.logprobs,
                None,
                self._serving.text.tokenizer,
                request.return_tokens_as_token_ids,
                self._offsets.get(index, 0),
            )
            logprobs = encode(shaped)
        if request.return_token_ids and delta.token_ids:
            token_ids = b',"token_ids":' + encode(delta.token_ids)
        if not (text or token_ids or logprobs != b"null" or delta.finish_reason is not None):
            return b""
        if index not in self._begun:
            self._begun.add(index)
            if request.echo:
                text = _prompt_text(self._serving, request, self._answers, choice) + text
            if request.return_token_ids:
                token_ids += b',"prompt_token_ids":' + encode(self._answers.requests[index].prompt_token_ids)
        if delta.finish_reason is None:
            end = b"null"
        else:
            end = b'%b,"stop_reason":%b' % (encode(delta.finish_reason), encode(choice.stop_reason))
        return self._frame.event(
            index, b',"text":%b,"logprobs":%b%b,"finish_reason":%b' % (encode(text), logprobs, token_ids, end)
        )


def completion_response(
    serving: Serving, request: CompletionRequest, answers: Answers, collected: list[Collected]
) -> dict[str, Any]:
    """The fields of the answer after id, object, created and model."""
    tokenizer = serving.text.tokenizer
    choices = []
    for choice, answer in zip(answers.choices, collected, strict=True):
        prompt_ids = answers.requests[choice.index].prompt_token_ids
        prompt_entries = answers.prompt_logprobs.get(choice.index, [])
        logprobs = None
        if request.logprobs is not None:
            entries: list[TokenLogprobs | None] = [
                *(prompt_entries if request.echo else []),
                *answer.logprobs,
            ]
            logprobs, _ = completion_logprobs(
                entries, prompt_ids[0], tokenizer, request.return_tokens_as_token_ids, 0
            )
        shaped: dict[str, Any] = {
            "index": choice.index,
            "text": (_prompt_text(serving, request, answers, choice) if request.echo else "") + answer.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if request.prompt_logprobs is not None:
            shaped["prompt_logprobs"] = prompt_logprobs(prompt_entries, tokenizer)
        if request.return_token_ids:
            shaped |= {"token_ids": answer.token_ids, "prompt_token_ids": prompt_ids}
        choices.append(shaped)
    return {"choices": choices, "usage": answers.usage()}
