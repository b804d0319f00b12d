"""The plan of a step: order, packing, deadlines, priorities. No torch, no clock: time is an argument."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine import EngineConfig, Request, SamplingParams
from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.costs import CostModel
from firsttoken.engine.scheduler import Scheduler, StepPlan, _Job, schedule_in_time
from firsttoken.engine.sequence import Sequence

# 10 ms whatever is in it up to 100 tokens, then 0.1 ms a token: a floor and a slope, like real hardware.
COSTS = [(1, 0.010), (100, 0.010), (200, 0.020)]


def make(blocks: int = 400, **settings) -> Scheduler:
    config = replace(EngineConfig(max_num_batched_tokens=1000, max_num_seqs=8), **settings)
    return Scheduler(config, BlockPool(blocks, 16), CostModel(COSTS))


def seq(
    name: str, length: int, arrival: float = 0.0, *, slo: float | None = None, offset: int = 0, **request
) -> Sequence:
    tokens = list(range(offset, offset + length))
    r = Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=64), **request)
    return Sequence(
        request=r,
        token_ids=tokens,
        num_prompt_tokens=length,
        noise_seed=0,
        arrival=arrival,
        deadline=arrival + slo if slo is not None else None,
    )


def names(plan: StepPlan) -> list[str]:
    return [item.seq.request.request_id for item in plan.items]


def advance(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does after a forward pass: everything planned is computed, each sampler emits a token."""
    for item in plan.items:
        samples = item.samples
        item.seq.num_computed_tokens += item.num_tokens
        if samples:
            item.seq.token_ids.append(7)
        scheduler.register_computed(item.seq)


def test_small_prompts_share_a_step_while_it_costs_nothing():
    s = make()
    for i in range(4):
        s.add(seq(f"r{i}", 20, arrival=i, offset=1000 * i))
    assert names(s.plan(5.0)) == ["r0", "r1", "r2", "r3"]


def test_a_long_prompt_waits_for_a_short_one_instead_of_slowing_it():
    s = make()
    s.add(seq("long", 600, arrival=0.000))
    s.add(seq("short", 20, arrival=0.001, offset=5000))
    plan = s.plan(0.002)
    assert names(plan) == ["short"], "together the short one would take the long one's 60 ms"
    advance(s, plan)
    assert names(s.plan(0.012)) == ["short", "long"]


def test_of_a_burst_with_one_prefix_only_the_first_computes_it():
    s = make()
    for i in range(4):
        r = seq(f"r{i}", 640, arrival=i * 1e-6)
        r.token_ids[-8:] = [9000 + i] * 8
        s.add(r)
    plan = s.plan(0.1)
    assert names(plan) == ["r0"]
    advance(s, plan)
    plan = s.plan(0.2)
    assert names(plan) == ["r0", "r1", "r2", "r3"]
    assert [item.num_tokens for item in plan.items] == [1, 16, 16, 16]
    assert s.prefix_hits == 3 * 624


def test_chunks_leave_room_for_decodes_and_meet_the_gap_target():
    s = make(itl_target_ms=20.0)
    s.add(seq("a", 20))
    advance(s, s.plan(0.0))
    s.add(seq("b", 900, offset=5000))
    plan = s.plan(0.1)
    assert names(plan) == ["a", "b"]
    assert plan.num_tokens == 200, "20 ms hold 200 tokens"
    assert not plan.items[1].samples
    s.config = replace(s.config, itl_target_ms=None)
    advance(s, plan)
    assert s.plan(0.2).items[1].num_tokens == 900 - 199


def test_without_chunks_a_prompt_is_computed_in_one_step_even_above_the_limit():
    s = make(enable_chunked_prefill=False, max_num_batched_tokens=100)
    s.add(seq("a", 300))
    plan = s.plan(0.0)
    assert [(i.seq.request.request_id, i.num_tokens) for i in plan.items] == [("a", 300)]


def test_deadlines_order_feasible_before_hopeless_and_age_ends_starvation():
    s = make(max_num_seqs=1, max_waiting_s=30.0)
    s.add(seq("hopeless", 600, arrival=0.0, slo=0.03))
    s.add(seq("later", 200, arrival=0.0, slo=10.0, offset=2000))
    s.add(seq("urgent", 200, arrival=0.0, slo=0.05, offset=4000))
    s.add(seq("undated", 20, arrival=0.0, offset=6000))
    order = [x.request.request_id for x in s._prefill_candidates(0.001)]
    assert order == ["urgent", "later", "undated", "hopeless"]
    order = [x.request.request_id for x in s._prefill_candidates(30.031)]
    assert order[0] == "hopeless", "overdue beyond the age bound goes first"


@given(
    jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6),
)
def test_as_many_deadlines_are_met_as_any_order_could(jobs):
    made = [_Job(seq(f"r{i}", 1, slo=deadline), float(seconds)) for i, (seconds, deadline) in enumerate(jobs)]

    def in_time(order) -> int:
        end, count = 0.0, 0
        for job in order:
            end += job.seconds
            count += end <= job.seq.deadline
        return count

    kept, late = schedule_in_time(made, 0.0)
    assert sorted(map(id, kept + late)) == sorted(map(id, made))
    assert in_time(kept) == len(kept), "all that are kept are in time"
    assert len(kept) == max(in_time(order) for order in itertools.permutations(made))


def test_without_deadlines_no_stream_of_short_prompts_starves_a_long_one():
    s = make(max_num_seqs=1)
    long = seq("long", 1000, arrival=0.0)
    s.add(long)
    now, served = 0.0, 0
    for i in range(200):
        s.add(seq(f"s{i}", 20, arrival=now, offset=5000))
        plan = s.plan(now)
        if long in [item.seq for item in plan.items]:
            break
        for item in list(plan.items):
            s.remove(item.seq)
        served += 1
        now += 0.010
    # 3 x its own 100 ms of prefill is the most that its length can cost it, beside one short prompt's own bias.
    assert 0 < served <= 35


def test_a_better_class_takes_the_slot_and_is_not_slowed_by_the_others():
    s = make(max_num_seqs=2)
    s.add(seq("agent 1", 20, priority=1))
    s.add(seq("agent 2", 20, arrival=0.01, priority=1, offset=2000))
    advance(s, s.plan(0.02))
    s.add(seq("chat", 20, arrival=0.1, priority=0, offset=4000))
    plan = s.plan(0.1)
    assert names(plan) == ["chat"]
    advance(s, plan)
    assert s.num_preemptions == 1
    # The chat decodes; the remaining agent goes on beside it, the other waits for a slot.
    assert names(s.plan(0.2)) == ["chat", "agent 1"]


def test_a_paused_class_moves_on_after_half_a_second():
    s = make()
    s.add(seq("agent", 20, priority=1))
    advance(s, s.plan(0.0))
    served = []
    for i in range(12):
        now = 0.1 * (i + 1)
        s.add(seq(f"chat {i}", 20, arrival=now, priority=0, offset=1000 * (i + 1)))
        plan = s.plan(now)
        served.append("agent" in names(plan))
        advance(s, plan)
        for item in list(plan.items):
            if item.seq.request.priority == 0:
                s.remove(item.seq)
    assert any(served)
    assert not all(served)


def test_when_blocks_run_out_the_youngest_is_preempted_and_comes_back():
    s = make(blocks=6)
    s.add(seq("old", 46, arrival=0.0))
    s.add(seq("young", 46, arrival=0.1, offset=3000))
    plan = s.plan(0.2)
    assert names(plan) == ["old", "young"]
    advance(s, plan)
    for step in range(4):
        plan = s.plan(0.3 + step)
        advance(s, plan)
    assert names(plan) == ["old"]
    young = s.waiting[0]
    assert young.num_preemptions == 1
    assert young.block_table == []
    s.remove(s.running[0])
    plan = s.plan(9.0)
    assert names(plan) == ["young"]
    assert plan.items[0].num_tokens < 46, "its cached blocks were found again"
    s.pool.check()


def test_pins_yield_to_a_request_that_could_not_run_otherwise():
    s = make(blocks=4)
    s.add(seq("a", 32))
    plan = s.plan(0.0)
    advance(s, plan)
    s.pool.pin(plan.items[0].seq.block_table, until=1e9)
    s.remove(plan.items[0].seq)
    s.add(seq("b", 60, offset=3000))
    assert names(s.plan(1.0)) == ["b"]


def test_arrival_order_is_arrival_order():
    s = make(scheduling_policy="fcfs", max_num_seqs=1)
    s.add(seq("second", 20, arrival=2.0, priority=0, offset=5000))
    s.add(seq("first", 900, arrival=1.0, priority=5))
    assert names(s.plan(3.0)) == ["first"]


def test_costs_are_interpolated_corrected_and_inverted():
    costs = CostModel(COSTS)
    assert costs.predict(0) == 0
    assert costs.predict(50) == pytest.approx(0.010)
    assert costs.predict(150) == pytest.approx(0.015)
    assert costs.predict(400) == pytest.approx(0.040)
    assert costs.most_tokens(0.015) == 150
    assert costs.most_tokens(0.001) == 0
    for _ in range(200):
        costs.observe(150, 0.030)
    assert costs.predict(150) == pytest.approx(0.030, rel=0.02)
    assert CostModel([(1, 0.02), (8, 0.01), (16, 0.03)]).predict(1) == pytest.approx(0.01)
