"""Drafts from the target's own hidden states, in the engine: a few steps of one layer for all sequences at once.

The engine hands over the target's states of every computed token (`computed`), after the step's outputs are on their
way. They wait, untouched, until drafts are wanted or a block is full: without drafting the draft costs one short pass
a block, and a block that can be found by its hash always has its part of the draft's cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed
from firsttoken.speculate.drafter import Judge, run_chain
from firsttoken.speculate.feature_cache import Advance, FeatureCache
from firsttoken.speculate.feature_draft import FeatureDraft
from firsttoken.speculate.pending import PendingStates


class FeatureDrafter:
    """Implements `drafter.Drafter` for a feature draft."""

    lookahead = 0

    def __init__(
        self, draft: FeatureDraft, *, num_blocks: int, block_size: int, num_layers: int, name: str
    ) -> None:
        """draft: prepared. num_blocks, block_size: of the target's KV cache; num_layers: of the target."""
        self.draft_model = draft
        self.capture = draft.config.capture
        self.name = name
        self.step_share = 2 / num_layers
        self._cache = FeatureCache(draft, num_blocks, block_size)
        self._states = PendingStates(block_size)

    @torch.inference_mode()
    def computed(self, items: list[Computed], *, work: bool) -> None:
        """Takes the states of a step's tokens; writes those whose block is full, whether or not there is to be `work`:
        a full block is findable at once."""
        due = [
            Advance(item.seq.token_ids, item.block_table, pending, query=False)
            for item, pending in self._states.take(items)
        ]
        if due:
            self._cache.advance(due)

    def forget(self, seq: Sequence) -> None:
        self._states.forget(seq)

    def offers(self, seqs: list[Sequence], rooms: list[int]) -> list[int]:
        return [room if self._states.ready(seq) else 0 for seq, room in zip(seqs, rooms, strict=True)]

    def catch_up(self, seqs: list[Sequence]) -> None:
        """Less than a block is ever pending."""

    @torch.inference_mode()
    def draft(self, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
        parts = [Advance(s.token_ids, s.block_table, self._states.of(s), query=True) for s in seqs]
        query = self._cache.advance(parts)
        assert query is not None
        lengths = [s.num_computed_tokens for s in seqs]
        read = self._cache.read([s.block_table for s in seqs], lengths, room=max(counts))
        return run_chain(_FeatureChain(self.draft_model, query, read, lengths), seqs, counts, judge)


class _FeatureChain:
    """Implements `drafter.Chain`; drafted slots stand in the free columns of what `FeatureCache.read` gave."""

    def __init__(
        self,
        draft: FeatureDraft,
        query: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        read: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        lengths: list[int],
    ) -> None:
        self.token_ids = draft.token_ids
        self._draft = draft
        self._hidden, self._q, self._k, self._v = query
        self._keys, self._values, self._mask = read
        self._width = max(max(n - 1, 0) for n in lengths)
        self._positions = torch.tensor(lengths, device=draft.device)

    def first(self) -> torch.Tensor:
        seen = self._width + 1
        count, kv_heads, _, head_dim = self._keys.shape
        self._keys[:, :, seen - 1], self._values[:, :, seen - 1] = self._k, self._v
        out = F.scaled_dot_product_attention(
            self._q.reshape(count, kv_heads, -1, head_dim),
            self._keys[:, :, :seen],
            self._values[:, :, :seen],
            attn_mask=None if self._mask is None else self._mask[..., :seen],
        )
        self._hidden = self._draft.finish(self._hidden, out.reshape(count, -1))
        return self._draft.logits(self._hidden)

    def then(self, tokens: torch.Tensor) -> torch.Tensor:
        self._width += 1
        self._positions = self._positions + 1
        self._q, self._k, self._v = self._draft.project(tokens, self._hidden, self._positions)
        return self.first()
