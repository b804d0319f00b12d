"""What config.json may say, and the one line that refuses the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.config import ARCHITECTURES, ModelConfig
from tests.helpers.tiny import FAMILIES, tiny_config, tiny_model


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dict(raw, name="some/config.json")
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("some/config.json")
    return message


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["LlamaModel"], [], None])
def test_other_architectures_are_refused_with_the_supported_ones(architectures: list[str] | None) -> None:
    message = refusal(tiny_config("llama") | {"architectures": architectures})
    assert all(name in message for name in ARCHITECTURES)
    assert not architectures or architectures[0] in message


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope", "layer type"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"hidden_size": None}, ["config.json"]),
        ({"vocab_size": "many"}, ["many"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(overrides: dict[str, Any], names: list[str]) -> None:
    message = refusal(tiny_config("llama", **overrides))
    assert all(name in message for name in names)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str) -> None:
    raw = tiny_config("qwen3")
    del raw[key]
    assert key in refusal(raw)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), (2, [7, 2], (7, 2)), ([5, 6], 6, (6, 5)), (None, [3], (3,)), (None, None, ())],
)
def test_eos_ids_come_from_both_files(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", eos_token_id=in_config)))
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", {"sliding_window": 4}, (None, None, None)),
        ("mistral", {"sliding_window": 4}, (4, 4, 4)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, (None, None, None)),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4, 4)),
        (
            "qwen3",
            {
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (4, None, None),
        ),
    ],
)
def test_windows(family: str, overrides: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert ModelConfig.from_dict(tiny_config(family, **overrides)).layer_windows == expected


def test_layer_types_must_fit_the_layers() -> None:
    windows = {"sliding_window": 4, "use_sliding_window": True}
    for types in (["full_attention"], ["full_attention", "linear_attention", "full_attention"]):
        assert "layer_types" in refusal(tiny_config("qwen2", **windows, layer_types=types))


def test_the_context_counts_scaling_in() -> None:
    def context(scaling: dict[str, Any] | None) -> int:
        raw = tiny_config("llama", rope_scaling=scaling, max_position_embeddings=32_768)
        return ModelConfig.from_dict(raw).context_length

    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert context(None) == 32_768
    assert context({"rope_type": "llama3", "factor": 8.0, **llama3}) == 32_768
    assert context({"rope_type": "linear", "factor": 2.0}) == 65_536
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert context(yarn | {"original_max_position_embeddings": 32_768}) == 131_072
    assert context(yarn | {"original_max_position_embeddings": 8_192}) == 32_768


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_sizes(family: str, tied: bool) -> None:
    decoder = tiny_model(family, tie_word_embeddings=tied)
    matrices = sum(w.numel() for name, w in decoder.named_weights().items() if "proj.weight" in name)
    embeddings = decoder.embedding.numel() + (0 if tied else decoder.lm_head.weight.numel())
    assert decoder.config.num_parameters() == matrices + embeddings
    assert decoder.config.kv_bytes_per_token(2) == 2 * 2 * 3 * 2 * decoder.config.head_dim
