"""The engine's settings: each once, with its help text. No torch here; see `firsttoken.config` for flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field that carries its help text; `firsttoken.config` turns it into a flag, key and variable.

    `extra`: `flag` (another name, or False for none), `unit` ("ms", "s": a duration), `min` and `max`.
    """
    return field(default=default, metadata={"help": help, **extra})


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means: chosen at start from the model and the machine."""

    model: str = setting("", "Model folder (already resolved to a local path).", flag=False)
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = setting(
        "auto",
        "Weights, activations and KV cache. auto: bfloat16 where the hardware computes in it, else float32.",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: cuda if there is a GPU, else cpu.")
    max_model_len: int | None = setting(
        None, "Longest prompt + output, in tokens. Default: the model's own limit.", min=1
    )
    max_num_seqs: int = setting(64, "Most sequences in one step.", min=1)
    max_num_batched_tokens: int | None = setting(
        None, "Most tokens computed in one step. Default: 8192 on a GPU, 2048 on a CPU.", min=1
    )
    block_size: int = setting(16, "Tokens per KV block; prefixes are shared in whole blocks.", min=1)
    kv_cache_memory: str | None = setting(
        None,
        "Memory for the KV cache, a draft's included, as 2GiB or 500MB. Default: 1GiB on a CPU (less if that holds"
        " all that max_num_seqs sequences can use), on a GPU what gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = setting(
        0.92, "Share of the GPU's memory that the engine may use.", min=0.01, max=1
    )
    enable_prefix_caching: bool = setting(True, "Share the KV of equal prefixes between requests.")
    enable_chunked_prefill: bool = setting(
        True,
        "Split long prefills so that running sequences keep streaming. Off: a prompt is computed in one step.",
    )
    scheduling_policy: Literal["deadline", "fcfs"] = setting(
        "deadline",
        "Order of admission. deadline: priority class, then TTFT deadlines (see docs/scheduling.md); fcfs: arrival.",
    )
    ttft_slo_ms: float | None = setting(
        None,
        "Limit for the time to first token, as 500ms or 1.5s; orders admission.",
        flag="ttft-slo",
        unit="ms",
        min=0,
    )
    itl_target_ms: float | None = setting(
        None,
        "Target for the gap between tokens, as 50ms: prefill chunks are sized to keep it.",
        flag="itl-target",
        unit="ms",
        min=0,
    )
    max_waiting_s: float = setting(
        30.0, "Age bound: a request that has waited this long goes before all others of its priority.", min=0
    )
    seed: int = setting(0, "Seed from which requests without one draw theirs.")
    num_threads: int | None = setting(
        None, "CPU threads of the engine. Default: the cores this process may use.", min=1
    )
    draft: str | None = setting(
        None,
        "Drafter for speculation: a folder (of `draft train`, or any checkpoint with the model's tokenizer), a hub id,"
        " ngram, or none. Default: the model's own draft, else ngram.",
    )
    num_speculative_tokens: int | Literal["auto"] = setting(
        "auto",
        "Most tokens drafted per step (γ). auto: up to 8, chosen per step from measured acceptance and costs.",
        min=1,
    )
    speculation: Literal["auto", "always", "off"] = setting(
        "auto", "auto: speculate only where measured acceptance and step costs predict a gain."
    )


RUNTIME_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "ttft_slo_ms",
    "itl_target_ms",
    "draft",
    "num_speculative_tokens",
    "speculation",
)
"""Settings that may change between requests, see `Engine.reconfigure`."""


class ConfigError(ValueError):
    """A setting or input that cannot work; the message is one line that names what to change."""
