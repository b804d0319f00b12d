"""What a checkpoint folder may be, and the one line that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from tests.helpers.tiny import CPU, tiny_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_folder(tmp_path, "llama")
    return tmp_path


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def complaint(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_model(folder, torch.float32, CPU)
    message = str(raised.value)
    assert "\n" not in message
    return message


def weights(decoder: Decoder) -> list[torch.Tensor]:
    """What the decoder computes with."""
    parts = [decoder.embedding, decoder.lm_head.weight, decoder.norm.weight]
    for layer in decoder.layers:
        parts += [layer.input_norm.weight, layer.post_norm.weight]
        parts += [linear.weight for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_are_converted_to_the_dtype_asked_for(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    decoder = load_model(folder, dtype, CPU)
    gate_up = decoder.layers[1].gate_up.weight
    gate_up = gate_up.to_dense() if gate_up.is_mkldnn else gate_up
    names = ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert torch.equal(gate_up, torch.cat([stored[name] for name in names]).to(dtype))
    assert all(weight.dtype == dtype for weight in weights(decoder))


def test_shards_are_one_model(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "whole", "qwen3", seed=3)
    tiny_folder(tmp_path / "shards", "qwen3", seed=3, shards=4)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) >= 3
    whole, sharded = (
        weights(load_model(tmp_path / name, torch.float32, CPU)) for name in ("whole", "shards")
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, sharded, strict=True))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama", shards=4)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert gone.name in complaint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama", shards=4)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    assert name in complaint(tmp_path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    message = complaint(folder)
    assert "model.layers.2.mlp.up_proj.weight" in message
    assert str(folder) in message


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.ones(32)}))
    message = complaint(folder)
    assert "model.layers.3.input_layernorm.weight" in message
    assert "model.safetensors" in message


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    message = complaint(folder)
    assert all(part in message for part in ("model.safetensors", "model.norm.weight", "[31]", "[32]"))


def test_a_tensor_of_integers_is_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(32, 48, dtype=torch.int8)}))
    message = complaint(folder)
    assert name in message
    assert "I8" in message


@pytest.mark.parametrize("kept", [0, 7, 100, 5_000])
def test_a_truncated_file_is_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in complaint(folder)


def test_a_file_that_is_something_else_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(b"PK\x03\x04" * 5_000)
    assert str(file) in complaint(folder)


def test_weights_of_another_kind_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = complaint(folder)
    assert "safetensors" in message
    assert ".bin" in message


def test_tensors_that_follow_from_others_are_ignored(tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama", tie_word_embeddings=True)
    before = weights(load_model(tmp_path, torch.float32, CPU))
    extra = {
        "lm_head.weight": torch.zeros(97, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit(tmp_path, lambda tensors: tensors.update(extra))
    after = weights(load_model(tmp_path, torch.float32, CPU))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    assert "lm_head.weight" in complaint(tmp_path)
