"""What is asked of the engine and what it answers: pure data, no torch.

These dataclasses are also the wire format between the server and the engine process (msgspec encodes
dataclasses as they are), so every field is a plain value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Defaults are those of the OpenAI API, except `max_tokens`, which the caller sets.

    Order of application: logit_bias, penalties, min_tokens mask, temperature, top-k / top-p / min-p, noise.
    """

    temperature: float = 1.0
    """0 is greedy: the argmax after bias, penalties and masks."""
    top_p: float = 1.0
    top_k: int = 0
    """0: the whole vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    """None: the engine draws one. The same seed gives the same text, whatever else is in the batch."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Number of most likely tokens reported at each output position (0: only the sampled one); None: none.
    Logprobs are of the model's raw distribution: before bias, penalties and temperature, as in vLLM."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt's positions. Such a request reads nothing from the prefix cache."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """No EOS and no stop token before this many output tokens."""
    max_tokens: int = 16


@dataclass(slots=True, kw_only=True)
class Request:
    """One sequence to generate. `n` choices are n requests with the same seed and different `choice_index`."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    choice_index: int = 0
    """Enters the sampling noise, so that the choices of one seeded request differ."""
    priority: int = 0
    """Lower is served first (vLLM's convention)."""
    cache_salt: str | None = None
    """Prefix cache entries are shared only between requests of the same salt."""
    ttft_slo_ms: float | None = None
    """Limit for this request's time to first token; None: the engine's `ttft_slo_ms`."""
    arrival_time: float = 0.0
    """`time.monotonic()` at which the server took the request; 0: set by the engine."""
    speculate: bool = True
    """False: this request is never drafted for."""
    pin_seconds: float = 0.0
    """After the end, the request's cached blocks are kept from eviction for this long."""


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs at one position: the token that stands there, and the most likely ones, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RequestTiming:
    """Where the time to the first token went, in seconds; absent until known.

    queue: arrival → first scheduled; prefill: first scheduled → first token sampled;
    first_decode: first token → second token (the first step that is a decode).
    """

    queue: float | None = None
    prefill: float | None = None
    first_decode: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one engine step added to one request. Concatenated `token_ids` are the whole answer."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first output, when asked for: an entry per prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended the request, unless it was EOS. It is included in `token_ids`."""
    error: str | None = None
    """With finish_reason "error": what happened, in one line."""
    num_cached_tokens: int | None = None
    """With the first output: prompt tokens whose KV came from the prefix cache."""
    timing: RequestTiming | None = None
    """With the first output (queue, prefill) and the last (all)."""
    num_preemptions: int = 0
    num_drafts: int = 0
    """Cumulative: verification steps that had a draft."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
