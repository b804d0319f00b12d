"""The decoder against transformers' eager models, and against itself in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from tests.helpers.attention import PlainAttention
from tests.helpers.tiny import CPU, FAMILIES, tiny_folder, tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    **{f"llama-head_dim-{d}": ("llama", {"head_dim": d}) for d in (64, 128, 256)},
    "mistral-head_dim-64": ("mistral", {"head_dim": 64}),
    "qwen3-head_dim-128": ("qwen3", {"head_dim": 128}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "llama-vocabulary-128k": ("llama", {"vocab_size": 128_256}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3_ROPE, "head_dim": 64}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": YARN_ROPE, "head_dim": 64}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def tokens(decoder: Decoder, count: int = 75) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(decoder.config.vocab_size, (count,), generator=generator)


@torch.inference_mode()
def run(decoder: Decoder, ids: torch.Tensor, **options: Any) -> Any:
    attend = PlainAttention(decoder.config.layer_windows)
    return decoder.forward(ids, torch.arange(len(ids)), attend, **options)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    reference = tiny_folder(tmp_path, family, **overrides)
    decoder = load_model(tmp_path, torch.float32, CPU)
    ids = tokens(decoder)
    expected = reference(ids[None]).logits[0]
    assert expected.std() > 0.3, "the reference's logits say too little to be compared"
    torch.testing.assert_close(decoder.logits(run(decoder, ids)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama-llama3-rope", "qwen2-yarn", "mistral", "llama-linear-rope"])
@torch.inference_mode()
def test_older_configs_mean_the_same(variant: str, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, with "type" before "rope_type"; 5 writes rope_parameters."""
    family, overrides = VARIANTS[variant]
    tiny_folder(tmp_path, family, **overrides, rope_theta=5_000.0)
    decoder = load_model(tmp_path, torch.float32, CPU)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    assert "rope_theta" not in config
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    file.write_text(json.dumps(config))
    older = load_model(tmp_path, torch.float32, CPU)
    assert older.config == decoder.config
    assert torch.equal(older.rotary, decoder.rotary)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_captured_states_are_transformers_hidden_states(family: str, tmp_path: Path) -> None:
    reference = tiny_folder(tmp_path, family)
    decoder = load_model(tmp_path, torch.float32, CPU)
    ids = tokens(decoder)
    states = reference(ids[None], output_hidden_states=True).hidden_states
    hidden, captured = run(decoder, ids, capture=(0, 1, 2))
    assert len(captured) == 3
    for ours, theirs in zip([*captured, hidden], states, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-4, rtol=0)


@given(
    family=st.sampled_from(FAMILIES),
    window=st.sampled_from([None, 5]),
    cuts=st.lists(st.integers(1, 39), max_size=6, unique=True).map(sorted),
)
@torch.inference_mode()
def test_chunks_compute_what_a_whole_prompt_does(family: str, window: int | None, cuts: list[int]) -> None:
    windows = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    decoder = tiny_model(family, **(windows if window else {}))
    ids = tokens(decoder, 40)
    attend = PlainAttention(decoder.config.layer_windows)
    parts = [
        decoder.forward(ids[start:stop], torch.arange(start, stop), attend)
        for start, stop in zip([0, *cuts], [*cuts, 40], strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts), run(decoder, ids), atol=1e-12, rtol=0)


@given(rows=st.lists(st.integers(0, 19), max_size=25))
def test_last_rows_are_the_rows_of_the_whole(rows: list[int]) -> None:
    """Any rows, in any order, repeated or none at all; and every row's K and V are written all the same."""
    decoder = tiny_model("qwen3")
    ids = tokens(decoder, 20)
    hidden, captured = run(decoder, ids, capture=(2,), last_rows=torch.tensor(rows, dtype=torch.int64))
    torch.testing.assert_close(hidden, run(decoder, ids)[rows], atol=1e-12, rtol=0)
    assert captured[0].shape == (20, 32)


@torch.inference_mode()
def test_layers_can_be_run_in_ranges() -> None:
    """A shallow draft runs the first layers; the target may go on from there."""
    decoder = tiny_model("llama")
    ids = tokens(decoder, 20)
    positions, attend = torch.arange(20), PlainAttention(decoder.config.layer_windows)
    captured: list[torch.Tensor] = []
    hidden = decoder.run_layers(decoder.embed(ids), positions, attend, 0, 2)
    kept = hidden.clone()
    hidden = decoder.run_layers(hidden, positions, attend, 2, capture=(2, 0), captured=captured)
    assert torch.equal(decoder.norm(hidden), run(decoder, ids))
    assert len(captured) == 1
    assert torch.equal(captured[0], kept), "a captured state must not change with the stream"


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_bfloat16_is_as_exact_as_transformers(family: str, tmp_path: Path) -> None:
    """Against float64, our bfloat16 errs no more than half as much again as transformers' bfloat16 does.

    Widths are unlike any block size, so that packed layouts have remainders."""
    shape = {"hidden_size": 72, "intermediate_size": 136, "head_dim": 18, "vocab_size": 203}
    reference = tiny_folder(tmp_path, family, **shape)
    exact = load_model(tmp_path, torch.float64, CPU)
    ids = tokens(exact)
    truth = exact.logits(run(exact, ids))
    ours = load_model(tmp_path, torch.bfloat16, CPU)
    our_error = (ours.logits(run(ours, ids)).double() - truth).square().mean().sqrt()
    # Both start from the same float32 weights, rounded to bfloat16 by each.
    their_error = (reference.to(torch.bfloat16)(ids[None]).logits[0].double() - truth).square().mean().sqrt()
    assert our_error < 1.5 * their_error


def test_the_rotary_table_ends_where_the_engine_says(tmp_path: Path) -> None:
    tiny_folder(tmp_path)
    assert len(load_model(tmp_path, torch.float32, CPU).rotary) == 512
    assert len(load_model(tmp_path, torch.float32, CPU, max_positions=100).rotary) == 100
    assert len(load_model(tmp_path, torch.float32, CPU, max_positions=10_000).rotary) == 512
