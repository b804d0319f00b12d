"""Drafters with a model, in the engine: what they draft depends on the text alone, what comes out on nothing else."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from firsttoken.engine import Request, SamplingParams
from tests.engine.test_exactness import PREFIXES, workloads
from tests.engine.tiny import alone, drain, run_workload, tiny_engine, tokens_of
from tests.speculate.tiny_draft import Recorded, drafter_factory

MODELS = ["feature", "shallow", "separate"]


def recorded(kind, gamma, kept, always=True):
    make = drafter_factory(kind, gamma, always=always)
    return lambda *args: Recorded(make(*args), kept)


@settings(max_examples=90, deadline=None)
@given(
    kind=st.sampled_from(MODELS),
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
    kind, work, gamma, batched, num_seqs, kv_blocks, caching, chunked, always, window
):
    expected = {r.request_id: tokens_of(alone(r, window)) for _, r, _ in work}
    cold: dict = {}
    for _, request, _ in work:
        engine = tiny_engine(speculator=recorded(kind, 6, cold), window=window, enable_prefix_caching=False)
        engine.add_request(request)
        assert tokens_of(drain(engine)[request.request_id]) == expected[request.request_id]
    kept: dict = {}
    engine = tiny_engine(
        speculator=recorded(kind, gamma, kept, always),
        kv_tokens=kv_blocks * 4,
        max_model_len=80,
        window=window,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(batched, num_seqs),
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
    )
    got = run_workload(engine, work)
    for _, request, _ in work:
        name = request.request_id
        tokens = tokens_of(got[name])
        if got[name] and got[name][-1].finish_reason == "abort":
            assert tokens == expected[name][: len(tokens)]
        else:
            assert tokens == expected[name]
    assert engine.pool.num_used == 0
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
    if engine.stats()["num_accepted_tokens"]:
        event("with accepted drafts")


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_token_comes_before_any_draft_work(kind):
    order = []
    kept: dict = {}
    engine = tiny_engine(speculator=recorded(kind, 3, kept))
    speculator = engine.speculator
    real = speculator.inner.drafter.computed
    speculator.inner.drafter.computed = lambda items, *, work: (order.append("draft"), real(items, work=work))
    request = Request(
        request_id="r", prompt_token_ids=PREFIXES[1], sampling=SamplingParams(temperature=0, max_tokens=4)
    )
    engine.add_request(request)
    engine.step(lambda outputs: order.append("first token"))
    assert order == ["first token", "draft"]
    assert not kept


@pytest.mark.parametrize("kind", MODELS)
def test_prefix_hits_are_as_many_as_without_a_drafter(kind):
    hits = []
    for speculator in (None, drafter_factory(kind, 3)):
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


@pytest.mark.parametrize("kind", [*MODELS, "ngram"])
def test_an_ended_or_aborted_request_leaves_nothing_behind(kind):
    engine = tiny_engine(speculator=drafter_factory(kind, 3))
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
    drafter = engine.speculator.drafter
    held = {"separate": "_lags", "ngram": "_texts"}.get(kind, "_states")
    assert len(getattr(drafter, held)) == 0
