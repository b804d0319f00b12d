"""The GGUF file of SmolLM2-135M-Instruct → a Hugging Face folder with bf16 safetensors.

The result is the same to the last byte on every machine and with every version of the libraries, so the
conversion is written out here: dequantisation is one multiplication and one addition per weight in float32
(`gguf.quants`), rounding to bf16 is to nearest even, and the JSON files are written key by key.
It covers what this file needs (Llama, a byte-level BPE vocabulary), not GGUF in general.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF → Hugging Face: whole names, and the middle part of `blk.N.PART.weight`."""

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens (`gguf.TokenType.CONTROL`)."""


def convert(
    gguf_file: Path, folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Writes the model in `gguf_file` into the existing `folder`; calls on_progress(bytes so far, in all)."""
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    write_json(folder / "config.json", model_config(metadata))
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        },
    )
    write_json(folder / "tokenizer.json", tokenizer(metadata))
    write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    write_weights(reader, metadata, folder / "model.safetensors", on_progress)


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # float32 in the file: 9.999999747378752e-06 is 1e-5
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def special_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL_TOKEN
    ]


def tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json. GGUF's pre-tokenizer "smollm" is: every digit alone, then GPT-2's byte-level words."""
    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"unknown pre-tokenizer {metadata['tokenizer.ggml.pre']!r}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens(metadata),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`, as transformers has it."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{TENSOR_NAMES[match[2]]}.weight"
    return TENSOR_NAMES[name]


def rotate_half_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection, [heads x head_dim, hidden], from GGUF's order to transformers'.

    GGUF rotates neighbouring pairs (2i, 2i + 1) in RoPE, transformers pairs half a head apart (i, i + d/2).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.reshape(np.swapaxes(pairs, 1, 2), (rows, hidden))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 → the bits of bfloat16 (uint16), rounded to nearest even. The values are finite."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded: np.ndarray = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2")


def write_weights(
    reader: GGUFReader, metadata: dict[str, Any], file: Path, on_progress: Callable[[int, int], None]
) -> None:
    """All tensors as bf16 in one safetensors file (8-byte length, JSON header, data), one by one."""
    import gguf

    tensors = sorted(reader.tensors, key=lambda tensor: hugging_face_name(tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dimension first
        start, end = end, end + 2 * int(np.prod(shape))
        header[hugging_face_name(tensor.name)] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts at a multiple of 8 bytes
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    written = 0
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            part = tensor.name.split(".")[-2]
            if part in heads:
                values = rotate_half_order(values, heads[part])
            written += out.write(to_bfloat16(values).tobytes())
            on_progress(written, end)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
