"""A request's parameters and the model's defaults → what the engine draws by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from firsttoken.backends.base import BackendInfo
from firsttoken.engine.config import ConfigError
from firsttoken.engine.request import SamplingParams
from firsttoken.server.errors import bad_request
from firsttoken.server.schemas import MAX_STOP_CHARS, MAX_STOPS, Generation
from firsttoken.server.text import read_json


class SamplingDefaults(msgspec.Struct, kw_only=True):
    """Values for requests that name none. `max_new_tokens` also bounds those that do, as in vLLM."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


def load_sampling_defaults(generation_config: str, model_folder: Path) -> SamplingDefaults:
    """The defaults that `--generation-config` names: auto, vllm, or a folder. Raises ConfigError."""
    if generation_config == "vllm":
        return SamplingDefaults()
    folder = model_folder if generation_config == "auto" else Path(generation_config)
    path = folder / "generation_config.json"
    if generation_config != "auto" and not path.is_file():
        raise ConfigError(
            f"--generation-config {generation_config}: there is no {path};"
            " it takes auto, vllm, or a folder with that file"
        )
    values = {name: value for name, value in read_json(path).items() if value is not None}
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error} (--generation-config vllm ignores this file)") from None


def sampling_params(
    request: Generation,
    defaults: SamplingDefaults,
    info: BackendInfo,
    *,
    prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """`max_tokens` None: all that the context leaves. Raises ApiError 400 if prompt and answer do not fit."""
    room = info.max_model_len - prompt_tokens
    if room < 1:
        raise bad_request(
            f"The prompt has {prompt_tokens} tokens, and the model's context of {info.max_model_len} tokens"
            f" must hold it and at least one more: shorten the prompt by {1 - room}, or serve with a"
            " larger --max-model-len.",
            "messages" if hasattr(request, "messages") else "prompt",
            "context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise bad_request(
            f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than the"
            f" model's context of {info.max_model_len} tokens, which leaves {room}.",
            "max_completion_tokens" if getattr(request, "max_completion_tokens", None) else "max_tokens",
            "context_length_exceeded",
        )
    limits = [limit for limit in (max_tokens, defaults.max_new_tokens, room) if limit is not None]
    limit = max(1, min(limits))
    if request.min_tokens > limit:
        raise bad_request(
            f"min_tokens is {request.min_tokens}, but at most {limit} tokens can be made.",
            "min_tokens",
            "invalid_value",
        )
    top_k = _or(request.top_k, defaults.top_k)
    return SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, top_k),
        min_p=_or(request.min_p, defaults.min_p),
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(request, info.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        max_tokens=limit,
    )


def stop_strings(request: Generation) -> list[str]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: at most {MAX_STOPS} texts, not {len(stops)}.", "stop", "invalid_value")
    for i, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise bad_request(
                f"stop[{i}]: a stop text has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}.",
                "stop",
                "invalid_value",
            )
    return stops


def check_stream_options(request: Generation) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options: only with stream: true.", "stream_options", "invalid_value")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs: only without stream.", "prompt_logprobs", "invalid_value")


def _logit_bias(request: Generation, vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in request.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise bad_request(
                f"logit_bias: {key[:32]!r} is no token id of this model (0 to {vocab_size - 1}).",
                "logit_bias",
                "invalid_value",
            )
        bias[int(key)] = value
    return bias


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
