"""Drafts from the target's own hidden states, in the engine: a few steps of one layer for all sequences at once.

The engine hands over the target's states of every computed token (`computed`), after the step's outputs are on their
way. They wait, untouched, until drafts are wanted or a block is full: without drafting the draft costs one short pass
a block, and a block that can be found by its hash always has its part of the draft's cache.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from firsttoken.engine.costs import CostModel
from firsttoken.engine.engine import Computed
from firsttoken.engine.noise import gumbel, row_key
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.feature_cache import Advance, FeatureCache, Pending
from firsttoken.speculate.feature_draft import FeatureDraft
from firsttoken.speculate.policy import Acceptance, Calibration, MeasuredGain

_PROBE_EVERY, _PROBE_CYCLES = 128, 3
"""With drafts unprofitable, of every so many steps a few draft anyway: texts change."""
_PLAIN_EVERY, _PLAIN_STEPS = 100, 2
"""Plain steps before the first draft, and of every so many while drafting: what drafting is measured against."""
_TRIES = 8
"""Cycles before drafting is judged."""
_ADVANTAGE = 1.03
"""`auto` drafts only above this speed-up: below, the measurement's own error decides."""
_COST_RATE = 0.1
"""Weight of a new measurement of a drafting step in its running mean."""


class FeatureSpeculator:
    """Implements `engine.engine.Speculator` for a feature draft."""

    def __init__(
        self,
        draft: FeatureDraft,
        costs: CostModel,
        *,
        num_blocks: int,
        block_size: int,
        max_gamma: int,
        always: bool,
        name: str,
    ) -> None:
        """draft: prepared. num_blocks, block_size: of the target's KV cache."""
        self.draft = draft
        self.capture = draft.config.capture
        self.max_gamma = max_gamma
        self.name = name
        self._cache = FeatureCache(draft, num_blocks, block_size)
        self._block_size = block_size
        self._costs = costs
        self._always = always
        self._pending: dict[Sequence, Pending] = {}
        self._ended: list[Sequence] = []
        self._acceptance = Acceptance(max_gamma)
        self._calibrations = (Calibration(), Calibration())
        """Of greedy and of sampled sequences."""
        self._gain = MeasuredGain(costs)
        self._step_seconds: dict[int, float] = {}
        """By batch size, to the next power of two: what a drafting step takes."""
        self._probabilities: dict[Sequence, list[float]] = {}
        """The draft's own, of what it drafted for the step that runs now."""
        self._cycle_seconds = 0.0
        self._cycle_tokens = self._cycle_size = 0
        self._last_count = 1
        self._unprofitable = self._profitable = 0
        self._drafted = self._accepted = 0

    # -- states in ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def computed(self, items: list[Computed]) -> None:
        """Takes the states of a step's tokens; writes those whose block is full."""
        due: list[Advance] = []
        size = self._block_size
        for item in items:
            pending = self._pending.get(item.seq)
            if pending is None or pending.stop != item.start:
                # New, or computed again after a preemption: whole blocks up to here hold the rest.
                assert item.start % size == 0
                pending = self._pending[item.seq] = Pending(item.start, item.start)
            if item.stop > item.start:
                pending.states.append(item.states[: item.stop - item.start])
                pending.stop = item.stop
            if pending.stop // size > pending.start // size:
                due.append(Advance(item.seq.token_ids, item.block_table, pending, query=False))
        if due:
            self._cache.advance(due)
        for seq in self._ended:
            self._pending.pop(seq, None)
        self._ended.clear()

    def forget(self, seq: Sequence) -> None:
        # Not at once: the last states of a sequence that ends with a step come after its end, and fill a block.
        self._ended.append(seq)

    # -- drafts out -----------------------------------------------------------------------------------------

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in seqs]
        rooms = [self._room(seq) for seq in seqs]
        chosen = [i for i, room in enumerate(rooms) if room > 0][:budget]
        if not chosen:
            return drafts
        self._probabilities.clear()
        self._cycle_seconds, self._cycle_tokens, self._cycle_size = 0.0, 0, 0
        gamma = min(self.max_gamma, budget // len(chosen))
        if gamma > 0 and (self._always or self._pays(len(chosen))):
            found = self._draft([seqs[i] for i in chosen], [min(gamma, rooms[i]) for i in chosen])
            for i, draft in zip(chosen, found, strict=True):
                drafts[i] = draft
        return drafts

    def _room(self, seq: Sequence) -> int:
        """Most tokens worth drafting: none past the end of the answer, none before the sequence's states are here."""
        pending = self._pending.get(seq)
        if not seq.request.speculate or pending is None or pending.stop != seq.num_computed_tokens:
            return 0
        return min(self.max_gamma, seq.request.sampling.max_tokens - seq.num_output_tokens - 1)

    @torch.inference_mode()
    def _draft(self, seqs: list[Sequence], counts: list[int]) -> list[list[int]]:
        """At most counts[i] >= 1 tokens for each sequence."""
        started = time.perf_counter()
        steps = max(counts)
        parts = [Advance(s.token_ids, s.block_table, self._pending[s], query=True) for s in seqs]
        query = self._cache.advance(parts)
        assert query is not None
        hidden, q, k, v = query
        lengths = [s.num_computed_tokens for s in seqs]
        keys, values, mask = self._cache.read([s.block_table for s in seqs], lengths, room=steps)
        width = keys.shape[2] - steps
        drafts: list[list[int]] = [[] for _ in seqs]
        chances = [1.0] * len(seqs)
        probabilities: list[list[float]] = [[] for _ in seqs]
        floor = 0.0 if self._always else self._floor(len(seqs))
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        first_step = time.perf_counter()
        for j in range(steps):
            seen = width + j + 1
            keys[:, :, seen - 1], values[:, :, seen - 1] = k, v
            out = F.scaled_dot_product_attention(
                q.reshape(len(seqs), kv_heads, -1, head_dim),
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=None if mask is None else mask[..., :seen],
            )
            hidden = self.draft.finish(hidden, out.reshape(len(seqs), -1))
            rows, likely = self._pick(self.draft.logits(hidden), seqs, j)
            picked = self.draft.token_ids[rows]
            for i, (token, chance) in enumerate(zip(picked.tolist(), likely, strict=True)):
                chances[i] *= self._calibration(seqs[i]).rate(chance)
                if len(drafts[i]) == j < counts[i] and chances[i] >= floor:
                    drafts[i].append(token)
                    probabilities[i].append(chance)
            if j + 1 == steps or not any(len(d) == j + 1 < n for d, n in zip(drafts, counts, strict=True)):
                break
            positions = torch.tensor([n + j + 1 for n in lengths], device=picked.device)
            q, k, v = self.draft.project(picked, hidden, positions)
        ended = time.perf_counter()
        self._cycle_seconds = ended - started
        self._learn_cost(len(seqs), (ended - first_step) / (j + 1))
        self._cycle_size = len(seqs)
        self._probabilities = dict(zip(seqs, probabilities, strict=True))
        return drafts

    def _calibration(self, seq: Sequence) -> Calibration:
        return self._calibrations[seq.request.sampling.temperature > 0]

    def _pick(
        self, logits: torch.Tensor, seqs: list[Sequence], step: int
    ) -> tuple[torch.Tensor, list[float]]:
        """Row of the head for each sequence, with the noise and temperature by which the target will sample there,
        and the draft's own probability of it (at temperature 1 for greedy sequences)."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        temperatures = [s.request.sampling.temperature for s in seqs]
        scores = wide
        if any(temperatures):
            t = torch.tensor(temperatures, dtype=wide.dtype, device=wide.device)[:, None]
            keys = torch.tensor(
                [row_key(s.noise_seed, s.request.choice_index, len(s.token_ids) + step) for s in seqs],
                device=wide.device,
            )
            scores = torch.addcmul(wide, gumbel(keys, self.draft.token_ids, wide.dtype), t)
        rows = scores.argmax(-1)
        if self._always:
            return rows, [1.0] * len(seqs)
        top = wide.amax(-1)
        return rows, (top - wide.logsumexp(-1)).exp().tolist()

    # -- whether it pays ------------------------------------------------------------------------------------

    def _pays(self, count: int) -> bool:
        """Whether this step drafts, for `count` sequences."""
        self._last_count = count
        gain = self._gain
        if gain.plain_steps(count) < _PLAIN_STEPS:
            return False
        if gain.cycles(count) < _TRIES:
            return True
        if gain.speedup(count) >= _ADVANTAGE:
            self._profitable += 1
            return self._profitable % _PLAIN_EVERY >= _PLAIN_STEPS
        self._unprofitable += 1
        return self._unprofitable % _PROBE_EVERY < _PROBE_CYCLES

    def _floor(self, count: int) -> float:
        """The least chance to stand at which one more drafted token pays: its share of a drafting step and its row in
        the verification, counted in tokens that the time would bring otherwise."""
        plain = self._gain.plain_seconds(count)
        rate = count / plain * max(1.0, self._gain.speedup(count))
        rows = count * 3
        more = self._costs.predict(rows + count) - self._costs.predict(rows)
        return min(0.9, rate * (self._step_cost(count) + more) / count)

    def _step_cost(self, count: int) -> float:
        bucket = (count - 1).bit_length()
        known = self._step_seconds
        if not known:
            return 0.1 * self._costs.predict(1)
        if bucket in known:
            return known[bucket]
        return known[min(known, key=lambda b: abs(b - bucket))]

    def _learn_cost(self, count: int, seconds: float) -> None:
        bucket = (count - 1).bit_length()
        old = self._step_seconds.get(bucket)
        if old is None:
            self._step_seconds[bucket] = min(seconds, self._step_cost(count) * 2)  # the first one is cold
        else:
            self._step_seconds[bucket] = old + _COST_RATE * (min(seconds, 2 * old) - old)

    def observe(self, seq: Sequence, drafts: list[int], num_accepted: int) -> None:
        self._acceptance.observe(len(drafts), num_accepted)
        calibration = self._calibration(seq)
        for i, p in enumerate(self._probabilities.get(seq, ())[: num_accepted + 1]):
            calibration.observe(p, i < num_accepted)
        self._cycle_tokens += num_accepted
        self._drafted += len(drafts)
        self._accepted += num_accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if self._cycle_size:
            self._gain.observe(
                self._cycle_size, self._cycle_tokens + self._cycle_size, seconds + self._cycle_seconds
            )
        elif num_tokens:
            self._gain.observe_plain(num_tokens, seconds)

    def describe(self) -> dict[str, Any]:
        count = self._last_count
        speedup, tried = self._gain.speedup(count), self._gain.cycles(count)
        drafting = self._always or tried < _TRIES or speedup >= _ADVANTAGE
        if self._always:
            reason = f"always on, γ {self.max_gamma}"
        elif tried < _TRIES:
            reason = f"still measuring: {tried} of {_TRIES} cycles with {count} running"
        else:
            reason = (
                f"{'drafting pays' if drafting else 'not drafting'}: {self._gain.tokens_per_cycle(count):.2f} tokens"
                f" per cycle with {count} running, {self._gain.pays_above(count):.2f} would break even;"
                f" measured speed-up {speedup:.2f}"
            )
        return {
            "active": drafting and tried > 0,
            "drafter": self.name,
            "gamma": self.max_gamma if drafting else 0,
            "acceptance_rate": self._accepted / self._drafted if self._drafted else None,
            "predicted_speedup": speedup if tried else None,
            "reason": reason,
        }
