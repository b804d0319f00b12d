"""A tiny chat model as a folder: a real tokenizer and template, random layers."""

from __future__ import annotations

from pathlib import Path

from tests.engine.tiny import write_checkpoint
from tests.server.models import EOS, write_model


def write_chat_model(folder: Path, layers: int = 4) -> Path:
    write_model(folder)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 448,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": EOS,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    write_checkpoint(folder, raw, seed=5)
    return folder
