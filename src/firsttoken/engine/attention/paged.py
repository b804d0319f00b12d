"""The paged KV cache and attention over it in plain torch: the CPU's path, and the GPU's until a kernel takes over.

The cache of a layer is one tensor of slots, [kv_heads, num_slots, head_dim]; block b is slots
[b * block_size, (b + 1) * block_size). A sequence whose blocks are consecutive is read as a view; only one with
gaps is gathered. Long spans (prompts, chunks of them) are computed one by one, short ones together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import Batch, SeqSpan
from firsttoken.engine.attention.short import ShortGroup
from firsttoken.engine.memory import lazy_zeros
from firsttoken.engine.model.config import ModelConfig

SHORT = 32
"""Spans of at most this many rows are computed together, see `attention.short`."""
_BLOCK_ROWS = 160
"""Longer spans on a CPU are computed in blocks of this many rows, so that keys after a block are left out."""


class KVCache:
    """K and V of all layers, allocated once. Fresh pages cost no memory until they are written."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (config.num_layers, 2, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        # Zeros, not empty: a masked slot that was never written must not hold NaN.
        storage = lazy_zeros(shape, dtype, device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [(layer[0], layer[1]) for layer in storage]
        """(K, V) of each layer, each [kv_heads, num_slots, head_dim]."""


@dataclass(slots=True)
class _SpanPlan:
    """How one sequence is read, the same for every layer."""

    rows: slice
    q_len: int
    context_len: int
    view: slice | None
    """The sequence's slots, if its blocks are consecutive."""
    blocks: torch.Tensor | None
    """Else its blocks, int64."""
    masks: dict[int | None, torch.Tensor | None]
    """By sliding window, see `PagedAttention._mask`."""


class PagedAttention:
    """Attention for one batch; made per step, called per layer (see `attention.base.Attention`)."""

    def __init__(self, config: ModelConfig, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.windows = config.layer_windows
        self.device = batch.token_ids.device
        self._num_tokens = len(batch.token_ids)
        self._triangle: torch.Tensor | None = None
        narrowest = min((w for w in self.windows if w is not None), default=None)
        groups: dict[int, list[SeqSpan]] = {}
        self._spans: list[_SpanPlan] = []
        for span in batch.spans:
            if span.q_len <= SHORT and (narrowest is None or span.context_len <= narrowest):
                groups.setdefault(span.q_len, []).append(span)
            else:
                self._spans.append(self._plan(span))
        size = cache.block_size
        self._groups = [
            ShortGroup(spans, cache.num_blocks, size, self.group, cache.dtype, self.device)
            for spans in groups.values()
        ]
        self._write_at = self._slots(batch.spans)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.cache.layers[layer]
        if isinstance(self._write_at, slice):
            keys[:, self._write_at] = k.transpose(0, 1)
            values[:, self._write_at] = v.transpose(0, 1)
        else:
            keys.index_copy_(1, self._write_at, k.transpose(0, 1))
            values.index_copy_(1, self._write_at, v.transpose(0, 1))
        if len(self._groups) == 1 and isinstance(self._groups[0].rows, slice) and not self._spans:
            return self._groups[0].attend(q, keys, values)
        out = q.new_empty((self._num_tokens, q.shape[1] * q.shape[2]))
        for group in self._groups:
            out[group.rows] = group.attend(q[group.rows], keys, values)
        for span in self._spans:
            out[span.rows] = self._attend(span, layer, q[span.rows], keys, values)
        return out

    def _attend(
        self, span: _SpanPlan, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """q [q_len, heads, head_dim] → [q_len, heads * head_dim]."""
        k, v = self._read(span, keys), self._read(span, values)
        mask = span.masks[self.windows[layer]]
        n, group = span.q_len, self.group
        if self.device.type == "cpu" and mask is None:
            return self._attend_in_blocks(q, k, v)
        # [kv_heads, group, q_len, head_dim] against keys that all heads of the group read without a copy.
        heads = q.view(n, self.kv_heads, group, -1).permute(1, 2, 0, 3)
        k = k[:, None].expand(-1, group, -1, -1)
        v = v[:, None].expand(-1, group, -1, -1)
        causal = mask is None and n == span.context_len
        if mask is None and not causal:
            mask = self._causal_mask(n, span.context_len)
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, is_causal=causal)
        return out.permute(2, 0, 1, 3).reshape(n, -1)

    def _attend_in_blocks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last q_len positions, a block of rows at a time.

        The arithmetic is that of the textbook: scores and probabilities in the model's dtype, the softmax between
        them in float32. torch's fused CPU kernel takes half as long again in bfloat16, whose tiles it converts.
        """
        n, kv_heads, group, dim = len(q), self.kv_heads, self.group, q.shape[-1]
        context = k.shape[1]
        heads = (q * dim**-0.5).view(n, kv_heads, group, dim).permute(1, 2, 0, 3)
        out = q.new_empty((n, kv_heads, group, dim))
        hidden = self._hidden(min(n, _BLOCK_ROWS), q.dtype)
        for start in range(0, n, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, n - start)
            seen = context - n + start + rows
            block = heads[:, :, start : start + rows].reshape(kv_heads, group * rows, dim)
            scores = torch.bmm(block, k[:, :seen].contiguous().transpose(1, 2))  # see attention.short
            scores.view(kv_heads, group, rows, seen)[..., seen - rows :] += hidden[:rows, :rows]
            mixed = torch.bmm(scores.softmax(-1), v[:, :seen])
            out[start : start + rows] = mixed.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3)
        return out.view(n, -1)

    def _hidden(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, rows], -inf above the diagonal: what a row of a block must not see in its own block."""
        if self._triangle is None or len(self._triangle) < rows:
            self._triangle = torch.full((rows, rows), -torch.inf, dtype=dtype, device=self.device).triu(1)
        return self._triangle

    def _read(self, span: _SpanPlan, storage: torch.Tensor) -> torch.Tensor:
        """The span's keys or values, [kv_heads, context_len, head_dim]."""
        if span.view is not None:
            return storage[:, span.view]
        assert span.blocks is not None
        dim = storage.shape[-1]
        paged = storage.view(self.kv_heads, self.cache.num_blocks, self.cache.block_size * dim)
        gathered = paged.index_select(1, span.blocks).view(self.kv_heads, -1, dim)
        return gathered[:, : span.context_len]

    def _plan(self, span: SeqSpan) -> _SpanPlan:
        size = self.cache.block_size
        used = span.block_table[: -(-span.context_len // size)]
        first = used[0]
        view = blocks = None
        if used == list(range(first, first + len(used))):
            view = slice(first * size, first * size + span.context_len)
        else:
            blocks = torch.tensor(used, device=self.device)
        masks = {window: self._mask(span, window) for window in set(self.windows)}
        return _SpanPlan(
            rows=slice(span.q_start, span.q_start + span.q_len),
            q_len=span.q_len,
            context_len=span.context_len,
            view=view,
            blocks=blocks,
            masks=masks,
        )

    def _mask(self, span: SeqSpan, window: int | None) -> torch.Tensor | None:
        """[q_len, context_len], added to the scores, where a window limits the span; None: plain causal."""
        if window is None or span.context_len <= window:
            return None
        return self._causal_mask(span.q_len, span.context_len, window)

    def _causal_mask(self, n: int, context: int, window: int | None = None) -> torch.Tensor:
        """[n, context] in the cache's dtype for the last n positions."""
        position = torch.arange(context - n, context, device=self.device)[:, None]
        key = torch.arange(context, device=self.device)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        mask = torch.zeros(n, context, dtype=self.cache.dtype, device=self.device)
        return mask.masked_fill_(~seen, -torch.inf)

    def _slots(self, spans: list[SeqSpan]) -> slice | torch.Tensor:
        """Where the batch's rows go: a slice when they are neighbours, else slot numbers int64 [T]."""
        size = self.cache.block_size
        slots: list[int] = []
        for span in spans:
            for position in range(span.context_len - span.q_len, span.context_len):
                slots.append(span.block_table[position // size] * size + position % size)
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[-1] + 1)
        return torch.tensor(slots, device=self.device)
