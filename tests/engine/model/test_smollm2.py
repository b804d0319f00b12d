"""The decoder on a real model's weights and real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from firsttoken.engine.model.loader import load_model
from tests.helpers.attention import PlainAttention
from tests.helpers.tiny import CPU

TEXTS = [
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\nThe sky is blue because air scatters",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "请用一句话介绍北京。",
    "The capital of France is Paris, and the capital of Japan is Tokyo. Tell me a little about both of them.",
]


@torch.inference_mode()
def test_logits_equal_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    )
    decoder = load_model(smollm2, torch.float32, CPU)
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    for text in TEXTS:
        ids = torch.tensor(tokenizer.encode(text).ids)
        attend = PlainAttention(decoder.config.layer_windows)
        logits = decoder.logits(decoder.forward(ids, torch.arange(len(ids)), attend))
        torch.testing.assert_close(logits, reference(ids[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="PSS is read from Linux's /proc")
def test_loading_leaves_nothing_behind(smollm2: Path) -> None:
    """The weights, a packed head beside the tied embedding, and no page of the file."""

    def pss() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024

    before = pss()
    decoder = load_model(smollm2, torch.bfloat16, CPU)
    config = decoder.config
    weights = 2 * (config.num_parameters() + config.vocab_size * config.hidden_size)
    assert pss() - before < weights + 40 * 2**20
