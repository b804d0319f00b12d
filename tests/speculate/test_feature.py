"""The feature drafter in the engine: what it drafts depends on the text alone, and what comes out on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from firsttoken.engine import Request, SamplingParams
from firsttoken.engine.noise import gumbel, row_key
from tests.engine.test_exactness import PREFIXES, workloads
from tests.engine.tiny import VOCAB, NoCache, alone, drain, tiny_engine, tiny_model, tokens_of
from tests.speculate.tiny_draft import Recorded, feature_factory, tiny_draft


def recorded(gamma, kept, always=True):
    make = feature_factory(gamma, always=always)
    return lambda *args: Recorded(make(*args), kept)


@settings(max_examples=60, deadline=None)
@given(
    work=workloads(),
    gamma=st.integers(1, 6),
    batched=st.integers(4, 64),
    num_seqs=st.integers(1, 4),
    kv_blocks=st.integers(20, 60),
    caching=st.booleans(),
    chunked=st.booleans(),
    always=st.booleans(),
    window=st.sampled_from([None, None, 7]),
)
def test_tokens_and_drafts_are_those_of_a_request_alone(
    work, gamma, batched, num_seqs, kv_blocks, caching, chunked, always, window
):
    expected = {r.request_id: tokens_of(alone(r, window)) for _, r, _ in work}
    cold: dict = {}
    for _, request, _ in work:
        engine = tiny_engine(speculator=recorded(6, cold), window=window, enable_prefix_caching=False)
        engine.add_request(request)
        assert tokens_of(drain(engine)[request.request_id]) == expected[request.request_id]
    kept: dict = {}
    engine = tiny_engine(
        speculator=recorded(gamma, kept, always),
        kv_tokens=kv_blocks * 4,
        max_model_len=80,
        window=window,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(batched, num_seqs),
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
    )
    got: dict[str, list] = {r.request_id: [] for _, r, _ in work}
    step = 0
    while engine.has_work() or step <= 40:
        for arrival, request, _ in work:
            if arrival == step:
                engine.add_request(request)
        for _, request, cancelled in work:
            if cancelled == step:
                engine.abort(request.request_id)
        for output in engine.step():
            got[output.request_id].append(output)
        step += 1
        assert step < 600, "a request was never finished"
    for _, request, _ in work:
        name = request.request_id
        tokens = tokens_of(got[name])
        if got[name] and got[name][-1].finish_reason == "abort":
            assert tokens == expected[name][: len(tokens)]
        else:
            assert tokens == expected[name]
    compared = 0
    for key, draft in kept.items():
        if key in cold:
            n = min(len(draft), len(cold[key]))
            assert draft[:n] == cold[key][:n]
            compared += 1
    if compared:
        event("drafts compared with a cold run's")
    if engine.scheduler.num_preemptions:
        event("with preemptions")
    if engine.scheduler.prefix_hits:
        event("with prefix hits")
    if engine._counters["num_accepted_tokens"]:
        event("with accepted drafts")


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


def test_the_first_token_comes_before_any_draft_work():
    order = []
    kept: dict = {}
    engine = tiny_engine(speculator=recorded(3, kept))
    speculator = engine.speculator
    real = speculator.inner.computed
    speculator.inner.computed = lambda items: (order.append("draft"), real(items))
    request = Request(
        request_id="r", prompt_token_ids=PREFIXES[1], sampling=SamplingParams(temperature=0, max_tokens=4)
    )
    engine.add_request(request)
    engine.step(lambda outputs: order.append("first token"))
    assert order == ["first token", "draft"]
    assert not kept


def test_prefix_hits_are_as_many_as_without_a_drafter():
    hits = []
    for speculator in (None, feature_factory(3)):
        engine = tiny_engine(speculator=speculator)
        cached = []
        for i in range(3):
            prompt = PREFIXES[0] + [2 + i]
            params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
            engine.add_request(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=params))
            outputs = drain(engine)[f"r{i}"]
            cached.append(outputs[0].num_cached_tokens)
            # a second turn, behind the first one's answer
            turn = prompt + tokens_of(outputs) + [3]
            engine.add_request(Request(request_id=f"t{i}", prompt_token_ids=turn, sampling=params))
            cached.append(drain(engine)[f"t{i}"][0].num_cached_tokens)
        hits.append(cached)
    assert hits[0] == hits[1]
    assert max(hits[0]) >= len(PREFIXES[0])


def test_an_ended_or_aborted_request_leaves_nothing_behind():
    engine = tiny_engine(speculator=feature_factory(3))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for i in range(4):
        engine.add_request(
            Request(request_id=f"r{i}", prompt_token_ids=PREFIXES[0][: 9 + i], sampling=params)
        )
    for _ in range(4):
        engine.step()
    engine.abort("r1")
    drain(engine)
    engine.add_request(
        Request(request_id="last", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1))
    )
    drain(engine)
    assert not engine.speculator._pending


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
