"""The feature draft's arithmetic in the engine: its caches and batches change nothing."""

from __future__ import annotations

import pytest
import torch

from firsttoken.engine import Request, SamplingParams
from firsttoken.engine.noise import gumbel, row_key
from tests.engine.test_exactness import PREFIXES
from tests.engine.tiny import VOCAB, NoCache, drain, tiny_engine, tiny_model
from tests.speculate.tiny_draft import Recorded, drafter_factory, tiny_draft


def recorded(gamma, kept):
    make = drafter_factory("feature", gamma)
    return lambda *args: Recorded(make(*args), kept)


@torch.inference_mode()
def drafted_by_the_book(tokens: list[int], prompt: int, count: int, sampling: SamplingParams) -> list[int]:
    """EAGLE-3 without any cache: every slot computed again for every drafted token."""
    model, draft = tiny_model(), tiny_draft(tiny_model())
    group = model.config.num_heads // model.config.num_kv_heads
    known = torch.tensor(tokens)
    _, captured = model.forward(
        known[:-1], torch.arange(len(tokens) - 1), NoCache(group), capture=draft.config.capture
    )
    hidden = draft.fuse(torch.cat(captured, -1))  # of tokens 0 …; slot p takes that of token p - 1
    drafts: list[int] = []
    for j in range(count):
        ids = torch.tensor([*tokens[1:], *drafts])
        q, k, v = draft.project(ids, hidden, torch.arange(1, len(ids) + 1))
        stream = draft.finish(hidden, NoCache(group)(0, q, k, v))[-1:]
        logits = draft.logits(stream)
        if sampling.temperature:
            keys = torch.tensor([row_key(sampling.seed, 0, len(tokens) + j)])
            logits = logits / sampling.temperature + gumbel(keys, draft.token_ids, logits.dtype)
        drafts.append(int(draft.token_ids[logits.argmax()]))
        hidden = torch.cat((hidden, stream))
    return drafts


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_those_of_the_paper(temperature):
    sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=30, ignore_eos=True)
    prompt = PREFIXES[0][:21]
    kept: dict = {}
    engine = tiny_engine(speculator=recorded(4, kept))
    engine.add_request(Request(request_id="r", prompt_token_ids=prompt, sampling=sampling))
    drain(engine)
    assert len(kept) > 5
    for (_, tokens), draft in kept.items():
        assert draft == drafted_by_the_book(list(tokens), len(prompt), len(draft), sampling)


def test_a_draft_may_name_only_what_its_head_has():
    ids = set(tiny_draft(tiny_model()).token_ids.tolist())
    assert len(ids) == VOCAB - 8
    kept: dict = {}
    engine = tiny_engine(speculator=recorded(5, kept))
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=60, ignore_eos=True)
    engine.add_request(Request(request_id="r", prompt_token_ids=PREFIXES[2], sampling=params))
    drain(engine)
    assert kept
    assert {t for draft in kept.values() for t in draft} <= ids
