"""What every route needs of the model that is served, and the way from a checked request to its answers."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

from firsttoken.backends.base import Backend
from firsttoken.engine.request import Request
from firsttoken.observe.prometheus import ServerMetrics
from firsttoken.server.config import ServerConfig
from firsttoken.server.errors import ApiError, unavailable
from firsttoken.server.generation import Answers, Choice, Times
from firsttoken.server.sampling import (
    SamplingDefaults,
    check_stream_options,
    load_sampling_defaults,
    sampling_params,
    stop_strings,
)
from firsttoken.server.schemas import ChatRequest, CompletionRequest
from firsttoken.server.template import ChatTemplate, load_chat_template
from firsttoken.server.text import Tokenizer

_numbers = itertools.count(1)


@dataclass(slots=True)
class TextParts:
    """What is read from the model's folder for the HTTP process."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults


def load_text_parts(folder: Path, config: ServerConfig) -> TextParts:
    """Raises ConfigError with one line."""
    tokenizer = Tokenizer(folder)
    template = load_chat_template(folder, tokenizer.config, tokenizer.special_tokens, config.chat_template)
    return TextParts(tokenizer, template, load_sampling_defaults(config.generation_config, folder))


@dataclass(slots=True)
class Serving:
    """One model, ready to answer."""

    backend: Backend
    text: TextParts
    names: list[str]
    """Names of the model in the API; the first is the one in answers."""
    metrics: ServerMetrics
    created: int = 0

    def __post_init__(self) -> None:
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is the model's or absent."""
        if name is not None and name not in self.names:
            shown = name if len(name) <= 128 else name[:128] + "…"
            raise ApiError(
                404,
                f"The model {shown!r} does not exist here; this server has {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )

    def check_alive(self) -> None:
        if not self.backend.healthy:
            raise unavailable("The engine is not running at the moment; it is being restarted.")

    def answers(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        times: Times,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Answers:
        """The engine requests for all prompts and choices. Raises ApiError 400 if one does not fit."""
        check_stream_options(request)
        stops = stop_strings(request)
        number = next(_numbers)
        requests = []
        for p, prompt in enumerate(prompts):
            sampling = sampling_params(
                request,
                self.text.defaults,
                self.backend.info,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            requests += [
                Request(
                    request_id=f"{number}.{p}.{c}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    choice_index=c,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    ttft_slo_ms=request.ttft_slo_ms,
                    arrival_time=times.arrival,
                )
                for c in range(request.n)
            ]
        choices = [
            Choice(
                i,
                self.text.tokenizer.detokenizer(request.skip_special_tokens),
                stops,
                request.include_stop_str_in_output,
                request.min_tokens,
            )
            for i in range(len(requests))
        ]
        return Answers(requests, choices, times, sum(map(len, prompts)), request.n)
