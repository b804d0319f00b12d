"""A model's shape, read from the `config.json` and `generation_config.json` of a Hugging Face folder.

Read directly, without transformers: its import would cost the engine's process seconds and memory at start-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary position embedding; `rope.py` holds the formulas."""

    type: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """All types but default: how many times longer the context is than the one trained first."""
    original_max_position_embeddings: int = 0
    """llama3, yarn: the context trained first."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    truncate: bool = True
    """yarn: whether the corrected range is rounded outwards to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the decoder needs to know about a model. Sizes are in elements, lengths in tokens."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    """Biases on q, k and v (Qwen2 always; Llama and Qwen3 with `attention_bias`)."""
    o_bias: bool
    """A bias on the attention's output projection (Llama and Qwen3 with `attention_bias`)."""
    qk_norm: bool
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    layer_windows: tuple[int | None, ...]
    """Per layer: a token sees this many tokens, itself included; None: all before it."""
    eos_token_ids: tuple[int, ...]
    """The ids that end a text: those of generation_config.json, then those only config.json names."""

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Raises ConfigError if a file is missing or broken, or if the model is of an unsupported kind."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist")
        config = read_json(folder, "config.json")
        has_generation = (folder / "generation_config.json").exists()
        generation = read_json(folder, "generation_config.json") if has_generation else {}
        return cls.from_dict(config, generation, name=str(folder / "config.json"))

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None, *, name: str = "config.json"
    ) -> ModelConfig:
        """From the parsed content of config.json and generation_config.json; `name` is for error messages."""
        try:
            return _parse(config, generation or {}, name)
        except KeyError as missing:
            raise ConfigError(f"{name} has no {missing}; is this the model's own config.json?") from None
        except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{name} has a value that cannot be read: {error}") from None

    @property
    def context_length(self) -> int:
        """The longest text the model is made for, with linear and YaRN scaling counted in."""
        rope = self.rope
        if rope.type == "linear":
            return int(self.max_position_embeddings * rope.factor)
        if rope.type == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        return self.max_position_embeddings

    def kv_bytes_per_token(self, dtype_size: int) -> int:
        """Bytes of KV cache that one token takes over all layers, at `dtype_size` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_size

    def num_parameters(self) -> int:
        """Weights in all, norms and biases left out (they are under a thousandth)."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings


def _parse(config: dict[str, Any], generation: dict[str, Any], name: str) -> ModelConfig:
    architecture = (config.get("architectures") or ["(no architecture)"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{name}: {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    family = architecture.removesuffix("ForCausalLM")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ConfigError(f"{name}: {method} quantised weights are not supported; use the unquantised model")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"{name}: hidden_act {activation} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise ConfigError(f"{name}: mlp_bias is not supported")

    hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    # Qwen3's heads are of 128 unless the file says otherwise; the other families divide the hidden size.
    head_dim = int(config.get("head_dim") or (128 if family == "Qwen3" else hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{name}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{name}: head_dim {head_dim} is odd, rotary embeddings need pairs")
    attention_bias = bool(config.get("attention_bias", False)) and family in ("Llama", "Qwen3")
    eos = (*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id")))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=int(config["max_position_embeddings"]),
        rope=_rope(config, head_dim, name),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "Qwen2" or attention_bias,
        o_bias=attention_bias,
        qk_norm=family == "Qwen3",
        layer_windows=_windows(config, family, name),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _windows(config: dict[str, Any], family: str, name: str) -> tuple[int | None, ...]:
    """The sliding window of each layer. Mistral: in all layers. Qwen: with `use_sliding_window`, by `layer_types`
    or from layer `max_window_layers` up. Llama: none."""
    num_layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if family.startswith("Qwen"):
        window = window if config.get("use_sliding_window") else None
    if window is None or family == "Llama":
        return (None,) * num_layers
    if int(window) < 1:
        raise ConfigError(f"{name}: sliding_window {window} must be at least 1")
    if family == "Mistral":
        return (int(window),) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = int(config.get("max_window_layers", 28))
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"{name}: layer_types must be {num_layers} of sliding_attention or full_attention, one a layer"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


def _rope(config: dict[str, Any], head_dim: int, name: str) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    raw: dict[str, Any] = {**(config.get("rope_scaling") or config.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in raw.values()):
        raise ConfigError(f"{name}: rope parameters per layer type are not supported")
    kind: Any = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{name}: RoPE type {kind} is not supported; supported: {', '.join(ROPE_TYPES)}")
    rotary_share = raw.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotary_share not in (None, 1, 1.0):
        raise ConfigError(f"{name}: partial_rotary_factor {rotary_share} is not supported")
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type=kind, theta=theta, factor=float(raw["factor"]))
    longest = int(config["max_position_embeddings"])
    original = int(
        config.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or longest
    )
    if kind == "llama3":
        return RopeConfig(
            type=kind,
            theta=theta,
            factor=float(raw["factor"]),
            original_max_position_embeddings=original,
            low_freq_factor=float(raw["low_freq_factor"]),
            high_freq_factor=float(raw["high_freq_factor"]),
        )
    factor = float(raw.get("factor") or longest / original)
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_yarn_attention_factor(raw, factor),
    )


def _yarn_attention_factor(raw: dict[str, Any], factor: float) -> float:
    """YaRN (Peng et al. 2023), equation 22: 0.1 ln(factor) + 1; given two `mscale`s, the ratio of both."""
    if raw.get("attention_factor") is not None:
        return float(raw["attention_factor"])

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if raw.get("mscale") and raw.get("mscale_all_dim"):
        return scale(raw["mscale"]) / scale(raw["mscale_all_dim"])
    return scale(1.0)
