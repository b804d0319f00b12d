"""Frequencies at the sizes of real models, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.rope import inverse_frequencies
from tests.helpers.tiny import tiny_config

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen-yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-without-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    "yarn-details": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (128, 500_000.0), (256, 1_000_000.0)])
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    scaling = SCALINGS[name]
    shape = {"head_dim": head_dim, "max_position_embeddings": 131_072, "hidden_size": 512}
    reference = LlamaConfig(**shape, rope_parameters={"rope_theta": theta, **scaling})
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    raw = tiny_config("llama", **shape, rope_scaling=scaling, rope_theta=theta)
    rope = ModelConfig.from_dict(raw).rope
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
