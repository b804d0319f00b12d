"""With speculation on, tokens are drawn from the model's own distribution: a χ² test on fixed seeds."""

from __future__ import annotations

import pytest
import torch

from firsttoken.engine import Request, SamplingParams
from tests.engine.tiny import drain, full_logits, tiny_engine, tokens_of
from tests.speculate.tiny_draft import drafter_factory

PROMPT = [5, 9, 33, 2, 17]
TEMPERATURE = 0.8
RUNS = 1500
Z = 3.09
"""Of a normal distribution, at p = 0.001."""


def fits(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether χ² is below its critical value at p = 0.001, by Wilson and Hilferty's approximation (1931). Tokens
    expected fewer than 5 times share a cell."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    cells = torch.cat((expected[common], expected[~common].sum()[None]))
    seen = torch.cat((counts[common], counts[~common].sum()[None]))
    if cells[-1] < 5:  # too few for a cell of their own
        cells, seen = cells[:-1], seen[:-1]
    free = len(cells) - 1
    critical = free * (1 - 2 / (9 * free) + Z * (2 / (9 * free)) ** 0.5) ** 3
    return float(((seen - cells) ** 2 / cells).sum()) < critical


def second_tokens(kind: str) -> tuple[dict[int, torch.Tensor], int]:
    """(by first token: how often each token came second, drafts accepted) over many seeds."""
    engine = tiny_engine(speculator=drafter_factory(kind, 3), max_num_seqs=64)
    for seed in range(RUNS):
        sampling = SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=4, ignore_eos=True)
        engine.add_request(Request(request_id=str(seed), prompt_token_ids=PROMPT, sampling=sampling))
    counts: dict[int, torch.Tensor] = {}
    for outputs in drain(engine).values():
        first, second = tokens_of(outputs)[:2]
        counts.setdefault(first, torch.zeros(48, dtype=torch.float64))[second] += 1
    return counts, engine.stats()["num_accepted_tokens"]


@pytest.mark.parametrize("kind", ["feature", "shallow", "separate"])
def test_sampled_tokens_are_distributed_as_the_model_says(kind):
    counts, accepted = second_tokens(kind)
    assert accepted > RUNS / 4, "the drafts take part"
    first, seen = max(counts.items(), key=lambda item: float(item[1].sum()))
    logits = full_logits([*PROMPT, first])[-1]
    assert fits(seen, (logits / TEMPERATURE).softmax(-1))
    # What a lossy scheme gives is told apart: the same counts against a distribution a little sharper.
    assert not fits(seen, (logits / (TEMPERATURE * 0.7)).softmax(-1))
