"""Whatever happens around a request, its tokens are those it gets alone. Exact, on tiny float64 models."""

from __future__ import annotations

import random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from firsttoken.engine import Request, SamplingParams
from firsttoken.engine.costs import CostModel
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.ngram import NgramDrafter
from firsttoken.speculate.speculator import Speculator
from tests.engine.tiny import (
    VOCAB,
    ScriptedSpeculator,
    alone,
    drain,
    full_logits,
    run_workload,
    tiny_engine,
    tokens_of,
)

PREFIXES = [[random.Random(seed).randrange(2, VOCAB) for _ in range(40)] for seed in range(3)]


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        seed=draw(st.integers(0, 2**63)),
        max_tokens=draw(st.integers(1, 24)),
        ignore_eos=draw(st.booleans()),
    )
    if draw(st.booleans()):
        params.top_k = draw(st.sampled_from([0, 1, 5, VOCAB]))
        params.top_p = draw(st.sampled_from([0.3, 0.9, 1.0]))
        params.min_p = draw(st.sampled_from([0.0, 0.1]))
    if draw(st.booleans()):
        params.presence_penalty = draw(st.sampled_from([0.0, 0.8]))
        params.frequency_penalty = draw(st.sampled_from([0.0, 0.5]))
        params.repetition_penalty = draw(st.sampled_from([1.0, 1.3]))
    if draw(st.booleans()):
        params.logit_bias = {draw(st.integers(0, VOCAB - 1)): draw(st.sampled_from([-5.0, 2.0]))}
        params.min_tokens = draw(st.integers(0, params.max_tokens))
        params.stop_token_ids = (draw(st.integers(2, VOCAB - 1)),)
    return params


@st.composite
def requests(draw: st.DrawFn, index: int) -> Request:
    prefix = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 40))]
    tail = draw(st.lists(st.integers(2, VOCAB - 1), min_size=0 if prefix else 1, max_size=12))
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=prefix + tail,
        sampling=draw(sampling_params()),
        choice_index=draw(st.integers(0, 2)),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, "a"])),
        ttft_slo_ms=draw(st.sampled_from([None, 0.001, 1000.0])),
        pin_seconds=draw(st.sampled_from([0.0, 60.0])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, Request, int | None]]:
    """(step of arrival, request, step of cancellation or None)"""
    count = draw(st.integers(1, 6))
    return [
        (
            draw(st.integers(0, 12)),
            draw(requests(i)),
            draw(st.one_of(st.none(), st.none(), st.integers(0, 30))),
        )
        for i in range(count)
    ]


def make_speculator(kind: str, answers: dict[str, list[int]], gamma: int) -> object | None:
    def oracle(seq: Sequence, count: int) -> list[int]:
        done = seq.num_output_tokens
        return answers[seq.request.request_id][done : done + count]

    def garbage(seq: Sequence, count: int) -> list[int]:
        rng = random.Random(len(seq.token_ids))
        return [rng.randrange(VOCAB) for _ in range(count)]

    def half_right(seq: Sequence, count: int) -> list[int]:
        right = oracle(seq, count)
        return [t if i % 3 != 2 else (t + 1) % VOCAB for i, t in enumerate(right)]

    if kind == "ngram":
        return Speculator(NgramDrafter(min_n=1), CostModel(), gamma=gamma, always=True)
    scripts = {"oracle": oracle, "garbage": garbage, "half right": half_right}
    return ScriptedSpeculator(scripts[kind], gamma) if kind in scripts else None


@settings(max_examples=100, deadline=None)
@given(
    work=workloads(),
    kind=st.sampled_from(["none", "ngram", "oracle", "garbage", "half right"]),
    gamma=st.integers(1, 7),
    batched=st.integers(4, 64),
    num_seqs=st.integers(1, 4),
    kv_blocks=st.integers(20, 60),
    caching=st.booleans(),
    chunked=st.booleans(),
    policy=st.sampled_from(["deadline", "fcfs"]),
    window=st.sampled_from([None, None, 7]),
)
def test_a_request_gets_the_tokens_it_gets_alone(
    work, kind, gamma, batched, num_seqs, kv_blocks, caching, chunked, policy, window
):
    expected = {r.request_id: alone(r, window) for _, r, _ in work}
    answers = {name: tokens_of(outputs) for name, outputs in expected.items()}
    engine = tiny_engine(
        speculator=make_speculator(kind, answers, gamma),
        kv_tokens=kv_blocks * 4,
        max_model_len=80,
        window=window,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(batched, num_seqs),
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
    )
    got = run_workload(engine, work)
    for arrival, request, cancelled in work:
        name = request.request_id
        tokens = tokens_of(got[name])
        if cancelled is not None and arrival <= cancelled and got[name][-1].finish_reason == "abort":
            assert tokens == answers[name][: len(tokens)]
        else:
            assert tokens == answers[name]
            assert got[name][-1].finish_reason == expected[name][-1].finish_reason
            assert got[name][-1].stop_reason == expected[name][-1].stop_reason
    engine.pool.drop_pins(float("inf"))
    assert engine.pool.num_free == engine.pool.num_blocks, "blocks leaked"
    assert engine.pool.num_used == 0
    if engine.scheduler.num_preemptions:
        event("with preemptions")
    if engine.scheduler.prefix_hits:
        event("with prefix hits")
    if engine.stats()["num_accepted_tokens"]:
        event("with accepted drafts")


@pytest.mark.parametrize("window", [None, 7])
def test_alone_is_what_the_model_says(window):
    """`alone`, the yardstick of the test above, against a forward pass without any cache."""
    prompt = PREFIXES[0][:23]
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    )
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(int(full_logits(tokens, window)[-1].argmax()))
    assert tokens_of(alone(request, window)) == tokens[len(prompt) :]


def test_an_oracle_is_accepted_and_garbage_is_not():
    request = Request(
        request_id="r",
        prompt_token_ids=PREFIXES[1],
        sampling=SamplingParams(temperature=0.8, seed=5, max_tokens=25, ignore_eos=True),
    )
    answer = tokens_of(alone(request))
    oracle = make_speculator("oracle", {"r": answer}, 5)
    engine = tiny_engine(speculator=oracle)
    engine.add_request(request)
    outputs = drain(engine)["r"]
    assert tokens_of(outputs) == answer
    # The first token comes alone, then γ + 1 a step.
    assert [len(o.token_ids) for o in outputs] == [1, 6, 6, 6, 6]
    last = outputs[-1]
    assert (last.num_drafts, last.num_draft_tokens, last.num_accepted_tokens) == (4, 20, 20)
    stats = engine.stats()
    assert stats["draft_tokens_per_pos"] == stats["accepted_tokens_per_pos"] == [4] * 5
    assert stats["emitted_tokens_per_pos"] == [4] * 6

    engine = tiny_engine(speculator=make_speculator("garbage", {}, 5))
    engine.add_request(request)
    outputs = drain(engine)["r"]
    assert tokens_of(outputs) == answer
    assert outputs[-1].num_accepted_tokens < outputs[-1].num_draft_tokens / 4


def test_prompt_logprobs_and_logprobs_are_those_of_the_model_in_any_chunking():
    prompt = PREFIXES[2][:30]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    for batched in (4, 7, 64):
        engine = tiny_engine(max_num_batched_tokens=batched, max_num_seqs=4)
        warm = Request(request_id="warm", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
        engine.add_request(warm)
        drain(engine)
        engine.add_request(Request(request_id="r", prompt_token_ids=prompt, sampling=params))
        outputs = drain(engine)["r"]
        assert outputs[0].num_cached_tokens == 0, "prompt logprobs need every position computed"
        tokens = tokens_of(outputs)
        logprobs = full_logits(prompt + tokens).log_softmax(-1)
        shown = outputs[0].prompt_logprobs
        assert shown[0] is None
        assert len(shown) == len(prompt)
        shown = shown[1:] + [entry for o in outputs for entry in o.logprobs]
        assert len(shown) == len(prompt) - 1 + len(tokens)
        for row, token, entry in zip(logprobs, (prompt + tokens)[1:], shown, strict=False):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-9)
            assert entry.rank == int((row > row[token]).sum()) + 1
            assert [t for t, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()


def test_seeded_choices_differ_and_repeat():
    def run(choice: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
        return tokens_of(
            alone(Request(request_id="r", prompt_token_ids=[5, 6, 7], sampling=params, choice_index=choice))
        )

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_the_tiny_model_ends_texts_by_eos_sometimes():
    """The workloads above would not test stopping otherwise."""
    reasons = set()
    for seed in range(40):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=24)
        reasons.add(
            alone(Request(request_id="r", prompt_token_ids=[9, 8], sampling=params))[-1].finish_reason
        )
    assert reasons == {"stop", "length"}
