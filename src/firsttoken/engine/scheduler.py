"""Which sequences get how many tokens in the next step. Pure Python, no torch.

There are no phases. A sequence has known tokens and computed tokens; a step gives it some of the difference:
one token (decode), many (prefill, whole or in chunks), or one and its drafts (verification).

Decodes come first. What is left of the step goes to prefills in the order of `_prefill_candidates`; whether one more
prefill joins the step or waits for the next is decided by predicted step times (`_joins`), because on hardware
that is busy with one prompt a second one in the same step only makes the first one late.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from firsttoken.engine.blocks import BlockPool, OutOfBlocks
from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.sequence import Sequence

_AGE_BIAS = 3.0
"""Without a deadline a request is treated as if it had come this many times its own prefill later: short ones
pass long ones, and any wait outgrows the bias."""
_LONGEST_PAUSE_S = 0.5
"""A decode that yields to a prefill of a better priority class yields no longer than this."""


@dataclass(slots=True)
class Scheduled:
    """One sequence's part of a step: its next `num_tokens` known tokens, then its drafts."""

    seq: Sequence
    num_tokens: int
    drafts: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        """True if the step reaches the last known token, so that a new one comes out."""
        return self.num_tokens == self.seq.num_uncomputed_tokens


@dataclass(slots=True)
class StepPlan:
    """What one forward pass computes."""

    items: list[Scheduled] = field(default_factory=list)
    num_tokens: int = 0
    num_prefills: int = 0
    """Sequences in the plan with more than one token to compute."""

    def add(self, item: Scheduled) -> None:
        self.items.append(item)
        self.num_tokens += item.num_tokens + len(item.drafts)


@dataclass(slots=True)
class _Job:
    """A prefill and the seconds that it is predicted to take."""

    seq: Sequence
    seconds: float


def schedule_in_time(jobs: list[_Job], now: float) -> tuple[list[_Job], list[_Job]]:
    """(those that will meet their deadlines, in order; those that will not).

    Moore and Hodgson's algorithm (J. M. Moore, Management Science 15, 1968), which makes the number of jobs in
    time as large as one machine allows: go through the jobs by deadline, and whenever one would be late, leave out
    the longest so far. Then the shortest job that can go first without making anybody late does: the same number
    in time, and a lower mean.
    """
    kept: list[tuple[float, int]] = []  # a heap: longest first
    left_out: set[int] = set()
    by_deadline = sorted(jobs, key=lambda j: j.seq.deadline or 0.0)
    end = now
    for i, job in enumerate(by_deadline):
        heapq.heappush(kept, (-job.seconds, i))
        end += job.seconds
        if end > (job.seq.deadline or 0.0):
            seconds, longest = heapq.heappop(kept)
            end += seconds
            left_out.add(longest)
    in_time = [j for i, j in enumerate(by_deadline) if i not in left_out]
    late = [by_deadline[i] for i in sorted(left_out)]
    end, least_slack, first = now, float("inf"), 0
    for i, job in enumerate(in_time):
        if job.seconds <= least_slack and job.seconds < in_time[first].seconds:
            first = i
        end += job.seconds
        least_slack = min(least_slack, (job.seq.deadline or 0.0) - end)
    if first:
        in_time.insert(0, in_time.pop(first))
    return in_time, late


ProposeFn = Callable[[list[Sequence], int], list[list[int]]]
"""(decoding sequences, most draft tokens in all) -> drafts of each; see engine.Drafter."""


class Scheduler:
    """Owns the waiting and running sequences and their blocks."""

    def __init__(self, config: EngineConfig, pool: BlockPool, costs: CostModel) -> None:
        """config: with `max_num_batched_tokens` resolved; the engine replaces it when settings change."""
        self.config = config
        self.pool = pool
        self.costs = costs
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0

    @property
    def _max_tokens(self) -> int:
        assert self.config.max_num_batched_tokens is not None
        return self.config.max_num_batched_tokens

    # -- queue ----------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its blocks at once."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._release(seq)

    # -- a step ---------------------------------------------------------------------------------------------

    def plan(self, now: float, propose: ProposeFn | None = None) -> StepPlan:
        """The next step. Sequences in it have blocks for every token they compute."""
        self.pool.drop_pins(now)
        plan = StepPlan()
        prefills = self._prefill_candidates(now)
        decodes = [s for s in self.running if s.num_uncomputed_tokens == 1]
        paused = self._paused(decodes, prefills, now)
        if paused:
            decodes = [s for s in decodes if s not in paused]
        drafts: list[list[int]] = [[] for _ in decodes]
        if propose is not None and decodes:
            drafts = propose(decodes, self._max_tokens - len(decodes))
        self._plan_decodes(plan, decodes, drafts)
        self._plan_prefills(plan, prefills, now)
        if not plan.items and paused:
            self._plan_decodes(plan, paused, [[] for _ in paused])
        if not plan.items and (self.waiting or self.running) and self.pool.drop_one_pin():
            # Everything was blocked by pins: they yield, since the pool holds any single request by itself.
            return self.plan(now, propose)
        for item in plan.items:
            item.seq.last_scheduled = now
            if item.seq.first_scheduled is None:
                item.seq.first_scheduled = now
        return plan

    def _plan_decodes(self, plan: StepPlan, decodes: list[Sequence], drafts: list[list[int]]) -> None:
        # In order of age, so that the victims of preemption are the young ones at the end.
        order = sorted(range(len(decodes)), key=lambda i: (decodes[i].request.priority, decodes[i].arrival))
        for i in order:
            seq, draft = decodes[i], drafts[i]
            if not self._is_running(seq):
                continue  # preempted by an older one a moment ago
            if draft and not self._fits_without_preemption(seq, 1 + len(draft)):
                draft = []
            if self._ensure_blocks(seq, 1 + len(draft), plan):
                plan.add(Scheduled(seq, 1, draft))

    def _plan_prefills(self, plan: StepPlan, candidates: list[Sequence], now: float) -> None:
        decoding = plan.num_tokens > 0
        chunked = self.config.enable_chunked_prefill
        limit = self._max_tokens
        if chunked and decoding and self.config.itl_target_ms:
            allowed = self.costs.most_tokens(self.config.itl_target_ms / 1e3)
            limit = min(limit, max(allowed, plan.num_tokens + self.pool.block_size))
        finishing = 0
        short_of_blocks = False
        pending: set[bytes] = set()
        for position, seq in enumerate(candidates):
            waiting = not self._is_running(seq)
            matched: list[int] = []
            if waiting:
                # Strict order: nobody smaller takes the blocks that the head waits for, and nobody makes way for
                # one who could not start. Those that already have their blocks go on.
                if short_of_blocks:
                    continue
                full = len(self.running) >= self.config.max_num_seqs
                if full and not self._yield_slot(seq, plan):
                    continue
                matched = self._match(seq)
                if not self._fits(seq, matched):
                    short_of_blocks = True
                    continue
            todo = len(seq.token_ids) - (
                len(matched) * self.pool.block_size if waiting else seq.num_computed_tokens
            )
            left = limit - plan.num_tokens
            take = todo
            if finishing and not self._joins(
                plan, seq, todo, pending, finishing, len(candidates) - position - 1
            ):
                break
            if todo > left:
                if chunked:
                    if left <= 0 or finishing:
                        break
                    take = left
                elif plan.num_prefills:
                    break
            if waiting:
                self._admit(seq, matched)
            if not self._ensure_blocks(seq, take, plan):
                break
            plan.add(Scheduled(seq, take))
            plan.num_prefills += 1
            finishing += take == todo
            if self.config.enable_prefix_caching:
                pending.update(
                    seq.extend_hashes(self.pool.block_size)[seq.num_computed_tokens // self.pool.block_size :]
                )
            if plan.num_tokens >= limit:
                break

    def _joins(
        self, plan: StepPlan, seq: Sequence, todo: int, pending: set[bytes], finishing: int, behind: int
    ) -> bool:
        """Whether a prefill of `todo` tokens joins the step or waits for the next one.

        Joining makes the `finishing` sequences already in the step later by the tokens' marginal cost; it spares
        the newcomer, and everybody behind it, a step of its own. Waiting also lets it read the prefix that this
        step computes: of a burst of requests with one system prompt, only the first computes it.
        """
        shared = 0
        size = self.pool.block_size
        for h in seq.extend_hashes(size)[seq.num_computed_tokens // size :] if pending else ():
            if h not in pending:
                break
            shared += size
        shared = min(shared, todo - 1)
        alone = self.costs.predict(plan.num_tokens)
        together = self.costs.predict(plan.num_tokens + todo)
        own_step = self.costs.predict(todo - shared)
        delay = (together - alone) * finishing
        gain = (alone + own_step - together) * (1 + behind)
        return delay <= gain

    # -- order ----------------------------------------------------------------------------------------------

    def _prefill_candidates(self, now: float) -> list[Sequence]:
        """Everybody with more than one token to compute, in the order in which they are served.

        Priority class first, and within a class: the overdue beyond the age bound, by age; those that can meet
        their deadline (`_in_time`); those without a deadline, by age with a bias to few uncached tokens; the
        hopeless, fewest uncached tokens first.
        """
        candidates = [s for s in self.running if s.num_uncomputed_tokens > 1]
        candidates += self.waiting
        if len(candidates) < 2:
            return candidates
        if self.config.scheduling_policy == "fcfs":
            return sorted(candidates, key=lambda s: s.arrival)
        jobs = [_Job(s, self._predicted_prefill(s)) for s in candidates]
        ordered: list[Sequence] = []
        for priority in sorted({s.request.priority for s in candidates}):
            mine = [j for j in jobs if j.seq.request.priority == priority]
            ordered += [j.seq for j in self._by_deadline(mine, now)]
        return ordered

    def _by_deadline(self, jobs: list[_Job], now: float) -> list[_Job]:
        overdue, dated, undated = [], [], []
        for job in jobs:
            limit = job.seq.arrival if job.seq.deadline is None else job.seq.deadline
            if now - limit > self.config.max_waiting_s:
                overdue.append(job)
            elif job.seq.deadline is None:
                undated.append(job)
            else:
                dated.append(job)
        overdue.sort(key=lambda j: j.seq.arrival)
        undated.sort(key=lambda j: j.seq.arrival + _AGE_BIAS * j.seconds)
        in_time, late = schedule_in_time(dated, now)
        late.sort(key=lambda j: (j.seconds, j.seq.arrival))
        return overdue + in_time + undated + late

    def _predicted_prefill(self, seq: Sequence) -> float:
        """Seconds of the step that would finish this prefill, beside what is decoding now."""
        todo = seq.num_uncomputed_tokens
        if not self._is_running(seq):
            todo -= min(self._expected_hits(seq) * self.pool.block_size, todo - 1)
        return self.costs.predict(todo + len(self.running))

    def _paused(self, decodes: list[Sequence], prefills: list[Sequence], now: float) -> list[Sequence]:
        """Decodes that leave this step to a prefill of a better priority class, so that it is not slowed by them."""
        if not prefills or self.config.scheduling_policy == "fcfs":
            return []
        head = prefills[0]  # of the best class: priority is the first thing that candidates are ordered by
        if not self._is_running(head) and not self._fits(head, self._match(head)):
            return []  # it cannot start anyway
        best = head.request.priority
        return [s for s in decodes if s.request.priority > best and now - s.last_scheduled < _LONGEST_PAUSE_S]

    def _yield_slot(self, seq: Sequence, plan: StepPlan) -> bool:
        """With all slots taken, a running sequence of a worse class that is not in the plan makes way."""
        if self.config.scheduling_policy == "fcfs":
            return False
        planned = {id(item.seq) for item in plan.items}
        worse = [
            s for s in self.running if s.request.priority > seq.request.priority and id(s) not in planned
        ]
        if not worse:
            return False
        self._preempt(max(worse, key=lambda s: (s.request.priority, s.arrival)))
        return True

    # -- blocks ---------------------------------------------------------------------------------------------

    def reserve(self, seqs: list[Sequence], count: int) -> None:
        """Blocks for `count` tokens of each decoding sequence from its last known one on, out of those that are free
        beyond what the step itself needs: a draft writes there before the step is planned."""
        size = self.pool.block_size
        needed = sum(seq_blocks(s.num_computed_tokens + 1, size) > len(s.block_table) for s in seqs)
        spare = self.pool.num_free - needed
        for seq in seqs:
            missing = seq_blocks(seq.num_computed_tokens + count, size) - len(seq.block_table)
            if 0 < missing <= spare:
                spare -= missing
                self._grow(seq, seq.num_computed_tokens + count)

    def prompts_wait(self) -> bool:
        """Whether a prompt, or the rest of one, is to be computed."""
        return bool(self.waiting) or any(s.num_uncomputed_tokens > 1 for s in self.running)

    def _is_running(self, seq: Sequence) -> bool:
        return bool(seq.block_table)

    def _match(self, seq: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix. At least one token is left to compute."""
        if not self.config.enable_prefix_caching:
            return []
        most = seq.max_prefix_read // self.pool.block_size
        return self.pool.match(seq.extend_hashes(self.pool.block_size)[:most]) if most else []

    def _fits(self, seq: Sequence, matched: list[int]) -> bool:
        """Whether a waiting sequence's known tokens and its next one find blocks, beside its `matched` ones."""
        need = seq_blocks(len(seq.token_ids) + 1, self.pool.block_size) - len(matched)
        return need <= self.pool.num_free - self.pool.num_evictable(matched)

    def _expected_hits(self, seq: Sequence) -> int:
        """About as many blocks as `_match` finds, for ordering a long queue: looks only where the last look ended.
        A prefix is evicted from its end, so a block that is still cached nearly always means those before it are."""
        if not self.config.enable_prefix_caching:
            return 0
        most = seq.max_prefix_read // self.pool.block_size
        hashes, cached, count = seq.extend_hashes(self.pool.block_size), self.pool.cached, seq.expected_hits
        while count and (count > most or hashes[count - 1] not in cached):
            count -= 1
        while count < most and hashes[count] in cached:
            count += 1
        seq.expected_hits = count
        return count

    def _admit(self, seq: Sequence, matched: list[int]) -> None:
        """waiting -> running: takes the matched blocks and fresh ones for the rest of the known tokens."""
        size = self.pool.block_size
        self.pool.acquire(matched)
        seq.block_table = list(matched)
        seq.num_computed_tokens = len(matched) * size
        seq.num_registered_blocks = len(matched)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            if self.config.enable_prefix_caching:
                self.prefix_queries += seq.num_prompt_tokens
                self.prefix_hits += seq.num_cached_tokens
        self.waiting.remove(seq)
        self.running.append(seq)
        self._grow(seq, len(seq.token_ids))

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        """Blocks for `num_tokens` positions in all. Raises OutOfBlocks."""
        size = self.pool.block_size
        missing = seq_blocks(num_tokens, size) - len(seq.block_table)
        if missing > 0:
            # Room for the whole known sequence and a good part of its answer, so that its blocks stay neighbours.
            final = len(seq.token_ids) + min(seq.request.sampling.max_tokens - seq.num_output_tokens, 256)
            room = max(0, seq_blocks(final, size) - len(seq.block_table) - missing)
            after = seq.block_table[-1] if seq.block_table else None
            seq.block_table += self.pool.allocate(missing, after=after, room=room)

    def _fits_without_preemption(self, seq: Sequence, count: int) -> bool:
        missing = seq_blocks(seq.num_computed_tokens + count, self.pool.block_size) - len(seq.block_table)
        return missing <= self.pool.num_free

    def _ensure_blocks(self, seq: Sequence, count: int, plan: StepPlan) -> bool:
        """Blocks for the next `count` tokens, by preempting younger or less important sequences if need be.
        False if `seq` itself had to go."""
        while True:
            try:
                self._grow(seq, seq.num_computed_tokens + count)
                return True
            except OutOfBlocks:
                planned = {id(item.seq) for item in plan.items}
                others = [s for s in self.running if id(s) not in planned and s is not seq]
                victim = max([*others, seq], key=lambda s: (s.request.priority, s.arrival))
                self._preempt(victim)
                if victim is seq:
                    return False

    def _preempt(self, seq: Sequence) -> None:
        """running -> waiting. Its blocks stay cached as long as nobody needs them; the rest is recomputed."""
        self.running.remove(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.append(seq)

    def _release(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed_tokens = 0
        seq.num_registered_blocks = 0

    def register_computed(self, seq: Sequence) -> None:
        """After a step: full blocks of computed, known tokens become findable. Rejected drafts never are."""
        if not self.config.enable_prefix_caching:
            return
        size = self.pool.block_size
        full = seq.num_computed_tokens // size
        if full > seq.num_registered_blocks:
            hashes = seq.extend_hashes(size)
            for i in range(seq.num_registered_blocks, full):
                self.pool.register(seq.block_table[i], hashes[i])
            seq.num_registered_blocks = full


def seq_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` positions need."""
    return -(-num_tokens // block_size)
