"""From settings to numbers: dtype, device, how long, how many at once, how much KV. Errors name what to change."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast, get_args, get_type_hints

import torch

from firsttoken.engine.config import RUNTIME_SETTINGS, ConfigError, EngineConfig
from firsttoken.engine.model.config import ModelConfig

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_CPU_KV_BYTES = 2**30


@dataclass(slots=True, frozen=True)
class DraftMemory:
    """What a drafter takes beside the model, in bytes."""

    weights: int = 0
    kv_per_token: int = 0
    """Its own cache lies on the model's blocks: so much for every token that these hold."""


MeasureDraft = Callable[[EngineConfig, ModelConfig, torch.dtype], DraftMemory]


@dataclass(slots=True, frozen=True)
class Limits:
    """What the settings came to on this machine."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    max_batched_tokens: int
    num_blocks: int

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The settings with every default resolved."""
        return replace(
            config,
            dtype=cast(Any, str(self.dtype).removeprefix("torch.")),
            device=cast(Any, self.device.type),
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_batched_tokens,
        )

    def reconfigured(self, config: EngineConfig, changes: dict[str, Any]) -> tuple[Limits, EngineConfig]:
        """Limits and settings after run-time `changes`; raises ConfigError and changes nothing otherwise."""
        for name in changes:
            if name not in RUNTIME_SETTINGS:
                raise ConfigError(
                    f"{name} cannot change while the engine runs; these can: {', '.join(sorted(RUNTIME_SETTINGS))}"
                )
        _check_types(changes)
        config = replace(config, **changes)
        batched = _batched_tokens(config, self.device)
        _check_settings(config, batched)
        return replace(self, max_batched_tokens=batched), replace(config, max_num_batched_tokens=batched)


def resolve_limits(
    config: EngineConfig, model: ModelConfig | None, draft_memory: MeasureDraft | None = None
) -> Limits:
    """Reads the model's config (not its weights) unless given, and settles every number. Raises ConfigError."""
    model = model or ModelConfig.from_folder(config.model)
    device = _device(config)
    dtype = _dtype(config, device)
    batched = _batched_tokens(config, device)
    _check_settings(config, batched)
    longest = config.max_model_len or model.context_length
    if config.max_model_len and config.max_model_len > model.context_length:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's context of {model.context_length};"
            " lower it"
        )
    draft = draft_memory(config, model, dtype) if draft_memory else DraftMemory()
    block_bytes = (model.kv_bytes_per_token(dtype.itemsize) + draft.kv_per_token) * config.block_size
    useful = -(-longest // config.block_size) * config.max_num_seqs
    num_blocks = _num_blocks(config, model, draft.weights, dtype, device, block_bytes, useful)
    tokens = num_blocks * config.block_size
    if tokens < longest:
        if config.max_model_len is not None or tokens < 2 * config.block_size:
            raise ConfigError(
                f"the KV cache holds {tokens} tokens, less than the {longest} of one request at full length; it"
                f" needs {size_text(-(-longest // config.block_size) * block_bytes)}: raise --kv-cache-memory or"
                " lower --max-model-len"
            )
        longest = tokens
    return Limits(dtype, device, longest, batched, num_blocks)


def parse_size(text: str, flag: str) -> int:
    """Bytes of "2GiB", "500MB" or "1073741824". Raises ConfigError naming `flag`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?b)?\s*", text.lower())
    if not match:
        raise ConfigError(f"{flag} {text!r} is not a size; write it as 2GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def size_text(num_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    raise AssertionError


def _num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    draft_weights: int,
    dtype: torch.dtype,
    device: torch.device,
    block_bytes: int,
    useful: int,
) -> int:
    """Blocks in the pool: what was asked for, or a default that the machine can hold."""
    weights = model.num_parameters() * dtype.itemsize + draft_weights
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Activations of one step, with room for the allocator's own slack.
        scratch = 2**30 + 24 * (config.max_num_batched_tokens or 8192) * model.hidden_size * dtype.itemsize
        available = int(free - (1 - config.gpu_memory_utilization) * total - weights - scratch)
        where = "--gpu-memory-utilization"
        wanted = available
    else:
        available = _available_memory() - weights - 2**28
        where = ""
        wanted = min(_CPU_KV_BYTES, useful * block_bytes)
    if config.kv_cache_memory is not None:
        wanted = parse_size(config.kv_cache_memory, "--kv-cache-memory")
    if wanted > available or wanted < block_bytes:
        cure = (
            f"lower --kv-cache-memory, raise {where}" if device.type == "cuda" else "lower --kv-cache-memory"
        )
        raise ConfigError(
            f"not enough memory: the weights take {size_text(weights)}, the KV cache wants"
            f" {size_text(max(wanted, block_bytes))}, and {size_text(max(available, 0))} is left for it; {cure} or free"
            " memory"
        )
    return wanted // block_bytes


def _available_memory() -> int:
    """Bytes that a process may still take on this machine, its control group's limit included."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as f:
            available = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f_max, open("/sys/fs/cgroup/memory.current") as f_now:
            limit = f_max.read().strip()
            if limit != "max":
                available = min(available, int(limit) - int(f_now.read()))
    except (OSError, StopIteration, ValueError):
        pass  # not Linux, or no control group: the machine's memory is the best there is
    return available


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU here; use --device cpu or install a CUDA build of torch"
        )
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32


def cpu_computes_bfloat16() -> bool:
    """True where the CPU multiplies bf16 itself (AVX512-BF16, AMX, or Arm's bf16); elsewhere float32 is faster."""
    try:
        with open("/proc/cpuinfo") as f:
            features = set(f.read().split())
    except OSError:
        return False  # not Linux
    return bool(features & {"avx512_bf16", "amx_bf16", "bf16"})


def _batched_tokens(config: EngineConfig, device: torch.device) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(8192 if device.type == "cuda" else 2048, config.max_num_seqs)


def _check_settings(config: EngineConfig, batched: int) -> None:
    def positive(name: str, value: float | None) -> None:
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")

    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "num_threads"):
        positive(name, getattr(config, name))
    for name in ("ttft_slo_ms", "itl_target_ms", "max_waiting_s"):
        positive(name.removesuffix("_ms").removesuffix("_s"), getattr(config, name))
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization is {config.gpu_memory_utilization}; it must be in (0, 1]"
        )
    if batched < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {batched} is less than --max-num-seqs {config.max_num_seqs}: every running"
            " sequence needs a token per step; raise the first or lower the second"
        )
    gamma = config.num_speculative_tokens
    if gamma == "auto":
        return
    positive("num_speculative_tokens", gamma)
    if gamma > 32:
        raise ConfigError(
            f"--num-speculative-tokens {gamma}: at most 32; beyond a handful, drafts are not accepted"
        )


def _check_types(changes: dict[str, Any]) -> None:
    hints = get_type_hints(EngineConfig)
    for name, value in changes.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"{name}: {value!r} is not a valid value")


def _fits(value: Any, hint: Any) -> bool:
    args = get_args(hint)
    if not args:
        if hint is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if hint is type(None):
            return value is None
        return type(value) is hint
    if all(isinstance(a, str) for a in args):
        return value in args
    return any(_fits(value, a) for a in args)
