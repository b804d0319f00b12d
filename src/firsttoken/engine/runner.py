"""A step plan → tensors → forward pass → sampled tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from firsttoken.engine.attention.base import Batch, SeqSpan
from firsttoken.engine.attention.paged import KVCache, PagedAttention
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.request import TokenLogprobs
from firsttoken.engine.sampler import Sampler, SampleRow, accept, token_logprobs
from firsttoken.engine.scheduler import StepPlan


@dataclass(slots=True)
class SeqResult:
    """What a step brought one sequence."""

    tokens: list[int] = field(default_factory=list)
    """New tokens in order: accepted drafts, then the one sampled behind them. Empty for a chunk of a prefill."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For the prompt positions behind the rows computed in this step."""
    states: torch.Tensor | None = None
    """With `capture`: the residual stream before each captured layer, of every row computed for the sequence, drafts
    included, [n, C * H]."""


class Runner:
    """Holds the model and its KV cache and runs plans on them. Knows nothing of queues."""

    def __init__(
        self, model: Decoder, num_blocks: int, block_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.model = model
        self.device = model.device
        self.cache = KVCache(model.config, num_blocks, block_size, model.dtype, model.device)
        self.sampler = Sampler(model.config.vocab_size, eos_token_ids, model.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan, capture: tuple[int, ...] = ()) -> list[SeqResult]:
        """Runs one step; results in the order of `plan.items`. capture: layers whose input drafts are made from."""
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[SeqSpan] = []
        wanted: list[int] = []
        rows: list[SampleRow] = []
        for item in plan.items:
            seq, start, row = item.seq, item.seq.num_computed_tokens, len(token_ids)
            token_ids += seq.token_ids[start : start + item.num_tokens]
            token_ids += item.drafts
            count = len(token_ids) - row
            positions.extend(range(start, start + count))
            spans.append(SeqSpan(row, count, start + count, seq.block_table))
            if seq.request.sampling.prompt_logprobs is not None and start < seq.num_prompt_tokens - 1:
                wanted.extend(range(row, row + item.num_tokens - item.samples))
            if item.samples:
                wanted.extend(range(row + item.num_tokens - 1, row + count))
                rows += [SampleRow(seq, item.drafts[:i]) for i in range(len(item.drafts) + 1)]
        batch = Batch(
            torch.tensor(token_ids, device=self.device), torch.tensor(positions, device=self.device), spans
        )
        captured: list[torch.Tensor] = []
        logits = self._forward(batch, wanted, capture, captured)
        results = self._sample(plan, logits, rows)
        if captured:
            states = torch.cat(captured, dim=-1)
            for result, span in zip(results, spans, strict=True):
                result.states = states[span.q_start : span.q_start + span.q_len]
        return results

    def _forward(
        self,
        batch: Batch,
        wanted: list[int],
        capture: tuple[int, ...] = (),
        captured: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits [len(wanted), V] of the given rows (of one row if none is wanted: the cache is what counts).
        `captured` gets the stream before each layer of `capture`, [T, H]."""
        last = None
        if len(wanted) < len(batch.token_ids):
            last = torch.tensor(wanted or [0], device=self.device)
        attend = PagedAttention(self.model.config, self.cache, batch)
        hidden = self.model.embed(batch.token_ids)
        hidden = self.model.run_layers(
            hidden, batch.positions, attend, capture=capture, captured=captured, last_rows=last
        )
        hidden = self.model.norm(hidden)
        return self.model.logits(hidden) if wanted else hidden

    def _sample(self, plan: StepPlan, logits: torch.Tensor, rows: list[SampleRow]) -> list[SeqResult]:
        results = [SeqResult() for _ in plan.items]
        prompt_rows = self._take_prompt_logprobs(plan, logits, results)
        if not rows:
            return results
        if prompt_rows:
            keep = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            keep[prompt_rows] = False
            logits = logits[keep]
        sampled = self.sampler.sample(logits, rows)
        first = 0
        for item, result in zip(plan.items, results, strict=True):
            if not item.samples:
                continue
            last = first + len(item.drafts) + 1
            result.tokens = accept(item.drafts, sampled[first:last])
            if (top := item.seq.request.sampling.logprobs) is not None:
                n = len(result.tokens)
                result.logprobs = token_logprobs(logits[first : first + n], result.tokens, [top] * n)
            first = last
        return results

    def _take_prompt_logprobs(
        self, plan: StepPlan, logits: torch.Tensor, results: list[SeqResult]
    ) -> list[int]:
        """Fills `prompt_logprobs` of the results; returns the rows of `logits` that were only for that."""
        used: list[int] = []
        row = 0
        for item, result in zip(plan.items, results, strict=True):
            seq, start = item.seq, item.seq.num_computed_tokens
            top = seq.request.sampling.prompt_logprobs
            if top is not None and start < seq.num_prompt_tokens - 1:
                count = item.num_tokens - item.samples
                # Rows of output tokens, recomputed after a preemption, are nobody's prompt.
                shown = max(0, min(count, seq.num_prompt_tokens - 1 - start))
                targets = seq.token_ids[start + 1 : start + 1 + shown]
                result.prompt_logprobs = token_logprobs(logits[row : row + shown], targets, [top] * shown)
                used.extend(range(row, row + count))
                row += count
            if item.samples:
                row += len(item.drafts) + 1
        return used

    @torch.inference_mode()
    def prime(self, row_counts: range, block: int) -> None:
        """Runs one layer and the head once for each row count; writes into `block`. oneDNN makes a kernel for every
        shape it meets, and a first token should not wait for that."""
        for rows in row_counts:
            spans = [SeqSpan(i, 1, 1, [block]) for i in range(rows)]
            ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
            attend = PagedAttention(self.model.config, self.cache, Batch(ids, ids, spans))
            self.model.logits(self.model.run_layers(self.model.embed(ids), ids, attend, 0, 1))

    @torch.inference_mode()
    def time_step(self, num_tokens: int, context_len: int, blocks: list[int], repeats: int) -> float:
        """Seconds (the least of `repeats`) of a forward pass of `num_tokens` tokens that ends at `context_len`;
        writes into `blocks`. For warm-up and the cost model."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(context_len - num_tokens, context_len, device=self.device)
        batch = Batch(ids, positions, [SeqSpan(0, num_tokens, context_len, blocks)])
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            self._forward(batch, [num_tokens - 1]).argmax(-1).tolist()
            best = min(best, time.perf_counter() - started)
        return best
