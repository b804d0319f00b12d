"""Tiny random models of every family: as a Decoder, or as a Hugging Face folder with its transformers twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
CPU = torch.device("cpu")


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model: 3 layers, 4 query heads to 2 KV heads, 97 tokens. Overrides go on top."""
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": family,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"head_dim": 8} if family == "qwen3" else {}),
        **({"sliding_window": None} if family == "mistral" else {}),
    } | overrides


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> Decoder:
    """A random tiny Decoder on the CPU, without transformers."""
    return Decoder.random(ModelConfig.from_dict(tiny_config(family, **overrides)), dtype, CPU, seed)


def tiny_folder(folder: Path, family: str = "llama", seed: int = 0, shards: int = 1, **overrides: Any) -> Any:
    """Writes a random tiny model to `folder` the way transformers does, in about `shards` files; returns it as
    the transformers model, float32, with eager attention.

    Weights are larger than a fresh model's, and norms and biases not neutral, so that every part shows in the logits.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = tiny_config(family, **overrides)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * value)
            else:
                weight.copy_(value * (weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5))
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // shards + 1024 if shards > 1 else "50GB")
    return model
