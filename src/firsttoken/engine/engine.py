"""The loop: plan, run, commit, emit. One thread owns everything in here."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.counters import Counters
from firsttoken.engine.limits import Limits, MeasureDraft, resolve_limits
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from firsttoken.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestTiming,
    SamplingParams,
)
from firsttoken.engine.runner import Runner, SeqResult
from firsttoken.engine.sampler import has_penalties
from firsttoken.engine.scheduler import Scheduled, Scheduler, StepPlan
from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed, Speculator, SpeculatorFactory

OnOutputs = Callable[[list[RequestOutput]], None]


class Engine:
    """A model that continues token sequences, many at once.

    >>> for output in Engine(EngineConfig(model=folder)).stream(prompt_ids, SamplingParams(max_tokens=8)):
    ...     print(output.token_ids)
    """

    def __init__(
        self,
        config: EngineConfig | str,
        *,
        model: Decoder | None = None,
        make_speculator: SpeculatorFactory | None = None,
        draft_memory: MeasureDraft | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Loads the model (or takes a loaded one). Raises ConfigError with one line if a setting cannot work.

        make_speculator: builds the drafter that the settings ask for; without it nothing is drafted.
        draft_memory: what that drafter will take of the memory that the KV cache gets the rest of.
        on_progress: called with each start-up stage's name and its seconds.
        """
        config = EngineConfig(model=config) if isinstance(config, str) else config
        self.startup: dict[str, float] = {}
        self._on_progress = on_progress or (lambda stage, seconds: None)
        started = time.perf_counter()
        self.limits: Limits = resolve_limits(config, model.config if model else None, draft_memory)
        if model is None:
            model = load_model(
                config.model, self.limits.dtype, self.limits.device, max_positions=self.limits.max_model_len
            )
        self._stage_done("load", started)
        self.model = model
        self.config = self.limits.apply(config)
        self._make_speculator = make_speculator
        size = self.config.block_size
        eos = model.config.eos_token_ids
        self.runner = Runner(model, self.limits.num_blocks, size, eos)
        self.pool = BlockPool(self.limits.num_blocks, size)
        self.costs = CostModel()
        self.scheduler = Scheduler(self.config, self.pool, self.costs)
        self.eos_token_ids = frozenset(eos)
        self.speculator = self._build_speculator(self.config)
        self._sequences: dict[str, Sequence] = {}
        self._ended_between_steps: list[RequestOutput] = []
        self._seeds = random.Random(config.seed)
        self._serial = itertools.count()
        self._drafting_seconds = 0.0
        self._counters = Counters()

    # -- requests -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ValueError in one line if it can never run."""
        self._check(request)
        now = time.monotonic()
        s = request.sampling
        limit = request.ttft_slo_ms if request.ttft_slo_ms is not None else self.config.ttft_slo_ms
        arrival = request.arrival_time or now
        room = self.limits.max_model_len - len(request.prompt_token_ids)
        if s.max_tokens > room:
            request = replace(request, sampling=replace(s, max_tokens=room))
        seq = Sequence(
            request=request,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            noise_seed=s.seed if s.seed is not None else self._seeds.getrandbits(64),
            arrival=arrival,
            deadline=arrival + limit / 1e3 if limit is not None else None,
        )
        self._sequences[request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; its blocks are free when this returns. Unknown ids are ignored. The next step
        reports it with finish_reason "abort"."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            output = RequestOutput(request_id=request_id)
            self._finish(seq, output, "abort")
            self._ended_between_steps.append(output)

    def has_work(self) -> bool:
        return bool(self._sequences or self._ended_between_steps)

    def stream(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Iterator[RequestOutput]:
        """One request in this process, step by step. Closing the iterator early aborts it."""
        request_id = f"stream-{next(self._serial)}"
        self.add_request(Request(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=sampling))
        try:
            while request_id in self._sequences:
                yield from (o for o in self.step() if o.request_id == request_id)
        finally:
            self.abort(request_id)

    # -- the loop -------------------------------------------------------------------------------------------

    def step(self, on_outputs: OnOutputs | None = None) -> list[RequestOutput]:
        """One step of everything. Outputs are handed to `on_outputs` before any work that the next step needs
        but they do not, and returned."""
        outputs, self._ended_between_steps = self._ended_between_steps, []
        started = time.monotonic()
        self._drafting_seconds = 0.0
        plan = self.scheduler.plan(started, self._propose if self.speculator else None)
        computed: list[Computed] = []
        if plan.items:
            results = self.runner.run(plan, self.speculator.capture if self.speculator else ())
            now = time.monotonic()
            for item, result in zip(plan.items, results, strict=True):
                seq, start, table = item.seq, item.seq.num_computed_tokens, item.seq.block_table
                if (output := self._commit(item, result, now)) is not None:
                    outputs.append(output)
                if self.speculator is not None:
                    stop = self._end_of_computed(item, result, start)
                    computed.append(Computed(seq, start, stop, table, result.states))
        if on_outputs is not None and outputs:
            on_outputs(outputs)
        if computed and self.speculator is not None:
            self.speculator.computed(computed, prompts_wait=self.scheduler.prompts_wait())
        if plan.items:
            self._after_step(plan, now - started)
        return outputs

    def _propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        assert self.speculator is not None
        started = time.monotonic()
        if lookahead := self.speculator.lookahead:
            self.scheduler.reserve(seqs, lookahead)
        drafts = self.speculator.propose(seqs, budget)
        self._drafting_seconds += time.monotonic() - started
        return drafts

    def _end_of_computed(self, item: Scheduled, result: SeqResult, start: int) -> int:
        """How many leading tokens are computed after a step that began at `start` and has been committed: all but
        the last known one, which was only sampled, and no rejected draft."""
        stop = start + item.num_tokens + max(len(result.tokens) - 1, 0)
        return min(stop, len(item.seq.token_ids) - 1) if result.tokens else stop

    def _commit(self, item: Scheduled, result: SeqResult, now: float) -> RequestOutput | None:
        """Takes a step's result into the sequence; None if there is nothing to tell yet."""
        seq, s = item.seq, item.seq.request.sampling
        start = seq.num_computed_tokens
        if result.prompt_logprobs:
            # Positions that a preemption made us compute again are already there.
            known = len(seq.prompt_logprobs) or 1
            seq.prompt_logprobs = seq.prompt_logprobs or [None]
            seq.prompt_logprobs += result.prompt_logprobs[known - (start + 1) :]
        if not item.samples:
            seq.num_computed_tokens = start + item.num_tokens
            return None
        output = RequestOutput(request_id=seq.request.request_id)
        tokens, finish = self._truncate(seq, result.tokens)
        accepted = len(result.tokens) - 1
        if item.drafts:
            self._count_drafts(seq, item.drafts, accepted, len(tokens))
        first = seq.num_output_tokens == 0
        seq.token_ids += tokens
        seq.num_computed_tokens = self._end_of_computed(item, result, start)
        if has_penalties(s):
            for token in tokens:
                seq.output_counts[token] = seq.output_counts.get(token, 0) + 1
        output.token_ids = tokens
        if s.logprobs is not None:
            output.logprobs = result.logprobs[: len(tokens)]
        self._counters.generation_tokens += len(tokens)
        if first:
            self._first_output(seq, output, now)
        elif seq.second_token is None:
            seq.second_token = now
        if finish is not None:
            if tokens and tokens[-1] in s.stop_token_ids and tokens[-1] not in self.eos_token_ids:
                output.stop_reason = tokens[-1]
            self._finish(seq, output, finish)
        return output

    def _first_output(self, seq: Sequence, output: RequestOutput, now: float) -> None:
        seq.first_token = now
        output.num_cached_tokens = seq.num_cached_tokens or 0
        output.timing = self._timing(seq)
        if seq.request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = seq.prompt_logprobs or [None]
        self._counters.prompt_tokens += seq.num_prompt_tokens
        self._counters.cached_prompt_tokens += seq.num_cached_tokens or 0

    def _truncate(self, seq: Sequence, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to a stop id or the length limit, and the reason if one was met."""
        s = seq.request.sampling
        done = seq.num_output_tokens
        for i, token in enumerate(tokens):
            count = done + i + 1
            if count > s.min_tokens and (
                token in s.stop_token_ids or (token in self.eos_token_ids and not s.ignore_eos)
            ):
                return tokens[: i + 1], "stop"
            if count >= s.max_tokens:
                return tokens[: i + 1], "length"
        return tokens, None

    def _count_drafts(self, seq: Sequence, drafts: list[int], accepted: int, emitted: int) -> None:
        seq.num_drafts += 1
        seq.num_draft_tokens += len(drafts)
        seq.num_accepted_tokens += accepted
        self._counters.add_drafts(len(drafts), accepted, emitted)
        if self.speculator is not None:
            self.speculator.observe(seq, drafts, accepted)

    def _finish(self, seq: Sequence, output: RequestOutput, reason: FinishReason) -> None:
        self.scheduler.register_computed(seq)
        if seq.request.pin_seconds > 0 and reason != "abort":
            self.pool.pin(seq.block_table, time.monotonic() + seq.request.pin_seconds)
        self.scheduler.remove(seq)
        del self._sequences[seq.request.request_id]
        if self.speculator is not None:
            self.speculator.forget(seq)
        output.finish_reason = reason
        output.timing = self._timing(seq)
        output.num_preemptions = seq.num_preemptions
        output.num_drafts = seq.num_drafts
        output.num_draft_tokens = seq.num_draft_tokens
        output.num_accepted_tokens = seq.num_accepted_tokens
        finished = self._counters.finished
        finished[reason] = finished.get(reason, 0) + 1

    def _timing(self, seq: Sequence) -> RequestTiming:
        timing = RequestTiming()
        if seq.first_scheduled is not None:
            timing.queue = max(0.0, seq.first_scheduled - seq.arrival)
            if seq.first_token is not None:
                timing.prefill = seq.first_token - seq.first_scheduled
                if seq.second_token is not None:
                    timing.first_decode = seq.second_token - seq.first_token
        return timing

    def _after_step(self, plan: StepPlan, seconds: float) -> None:
        """What the next step needs and the outputs did not have to wait for."""
        self._counters.steps += 1
        self._counters.step_seconds += seconds
        for item in plan.items:
            if item.seq.block_table:  # not ended
                self.scheduler.register_computed(item.seq)
        seconds -= self._drafting_seconds  # the cost model is of the target's steps alone
        self.costs.observe(plan.num_tokens, seconds)
        if self.speculator is not None and not plan.num_prefills:
            self.speculator.observe_step(plan.num_tokens, seconds)

    # -- start, settings, numbers ---------------------------------------------------------------------------

    def warmup(self) -> None:
        """Runs steps of several sizes: primes the kernels and fills the cost model with what they took."""
        started = time.perf_counter()
        size = self.config.block_size
        largest = min(
            self.limits.max_batched_tokens, self.limits.max_model_len, self.limits.num_blocks * size
        )
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if n <= largest]
        if self.limits.device.type == "cpu":
            # A CPU gains nothing per token above a few hundred; more would only lengthen the start.
            sizes = [n for n in sizes if n <= 256] or [1]
        blocks = self.pool.allocate(-(-max(sizes) // size))
        try:
            if self.limits.device.type == "cpu":
                self.runner.prime(range(1, 65), blocks[0])
            points = [(n, self.runner.time_step(n, n, blocks, repeats=3 if n <= 64 else 2)) for n in sizes]
        finally:
            self.pool.release(blocks)
        self.costs.set_points(points)
        self._stage_done("warmup", started)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. False while a request holds blocks."""
        return self.pool.reset_cache()

    def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Changes run-time settings while nothing is running; returns all effective settings."""
        if self._sequences:
            raise ConfigError("settings can change only while no request is running")
        self.limits, config = self.limits.reconfigured(self.config, changes)
        speculator = self._build_speculator(config)
        # Blocks cached until now lack a new drafter's part.
        stale = speculator is not None and speculator.capture != ()
        self.config, self.speculator = config, speculator
        self.scheduler.config = config
        self.pool.drop_pins(float("inf"))
        if stale or not config.enable_prefix_caching:
            self.pool.reset_cache()
        return asdict(config)

    def _build_speculator(self, config: EngineConfig) -> Speculator | None:
        if config.speculation == "off" or config.draft == "none":
            return None
        if self._make_speculator is None:
            if config.draft is not None:
                raise ConfigError(
                    f"draft={config.draft!r}: this engine was made without drafters;"
                    " use firsttoken.backends.factory.create_engine"
                )
            return None
        return self._make_speculator(config, self.costs, self.runner)

    def _check(self, request: Request) -> None:
        prompt, longest = request.prompt_token_ids, self.limits.max_model_len
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) >= longest:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; max_model_len is {longest},"
                " of which at least one is needed for the answer"
            )
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.sampling.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        vocab = self.model.config.vocab_size
        ids = itertools.chain(prompt, request.sampling.logit_bias, request.sampling.stop_token_ids)
        if (bad := next((t for t in ids if not 0 <= t < vocab), None)) is not None:
            raise ValueError(f"token id {bad} is outside the vocabulary of {vocab}")

    def _stage_done(self, stage: str, started: float) -> None:
        self.startup[stage] = time.perf_counter() - started
        self._on_progress(stage, self.startup[stage])

    def info(self) -> dict[str, Any]:
        """The fields of `backends.base.BackendInfo`."""
        return {
            "model": self.config.model,
            "max_model_len": self.limits.max_model_len,
            "vocab_size": self.model.config.vocab_size,
            "eos_token_ids": sorted(self.eos_token_ids),
            "device": str(self.limits.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "num_kv_blocks": self.limits.num_blocks,
            "block_size": self.config.block_size,
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.limits.max_batched_tokens,
            "settings": asdict(self.config),
            "startup": dict(self.startup),
        }

    def stats(self) -> dict[str, Any]:
        """The fields of `backends.base.EngineStats`, except the process's own."""
        return {
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_blocks_used": self.pool.num_used,
            "num_blocks_pinned": self.pool.num_pinned,
            "num_blocks_total": self.pool.num_blocks,
            **asdict(self._counters),
            "prefix_cache_queries": self.scheduler.prefix_queries,
            "prefix_cache_hits": self.scheduler.prefix_hits,
            "num_preemptions": self.scheduler.num_preemptions,
            "speculation": self.speculator.describe()
            if self.speculator
            else {"active": False, "gamma": 0, "verdict": "off", "reason": "speculation is off"},
        }
