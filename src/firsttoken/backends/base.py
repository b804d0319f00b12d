"""The seam between the HTTP server and whatever computes: one protocol, few types, no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from firsttoken.engine.request import Request, RequestOutput


class BackendError(RuntimeError):
    """The backend failed or died; the message is one line fit for a client."""


@dataclass(slots=True, kw_only=True)
class BackendInfo:
    """What the server needs to know about the engine once it is ready."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)
    """The engine's effective settings by name (EngineConfig with every default resolved)."""
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds per start-up stage: import, load, warmup …"""


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine. Counters only grow; gauges are of the last step."""

    # gauges
    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    """Blocks that a live request references (cached but unreferenced blocks are free)."""
    num_blocks_pinned: int = 0
    num_blocks_total: int = 0
    # counters
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache (vLLM's unit)."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_tokens_per_pos: list[int] = field(default_factory=list)
    accepted_tokens_per_pos: list[int] = field(default_factory=list)
    emitted_tokens_per_pos: list[int] = field(default_factory=list)
    """By steps that verified a draft: the accepted drafts and the token behind them, up to the answer's end."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests ended, by finish reason."""
    step_seconds: float = 0.0
    """Time spent inside steps; its rate is the engine's utilisation."""
    cpu_seconds: float = 0.0
    """User + system CPU time of the engine's process."""
    speculation: dict[str, Any] = field(default_factory=dict)
    """Whether speculation is on, γ in use, and the reason, in words and numbers."""


class Backend(Protocol):
    """An engine behind the server. One instance serves all requests of one model."""

    info: BackendInfo

    async def start(self) -> None:
        """Returns when the engine is warm. Raises ConfigError or BackendError with one line."""

    async def close(self) -> None:
        """Ends the engine and waits for it; idempotent."""

    @property
    def healthy(self) -> bool:
        """False while the engine is dead or restarting."""

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Outputs of one request until one is `finished`. Closing the iterator early aborts the request:
        its blocks are free within one step. Raises BackendError if the engine dies."""

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets finish_reason "abort". Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """The newest snapshot (at most one step, or one second when idle, old)."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. False if blocks are in use."""

    async def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Changes settings that may change at run time (`engine.config.RUNTIME_SETTINGS`) while no request is running;
        returns the effective settings. Raises ConfigError. Benchmarks use it between stages."""
