"""The paged KV cache and attention over it in plain torch: the CPU's path, and the GPU's until a kernel takes over.

The cache of a layer is one tensor of slots, [kv_heads, num_slots, head_dim]; block b is slots
[b * block_size, (b + 1) * block_size). A sequence whose blocks are consecutive is read as a view; only one with
gaps is gathered. Query heads that share a KV head are folded into rows of one product: on a CPU a grouped-query
`scaled_dot_product_attention` with one query row takes six times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import Batch, SeqSpan
from firsttoken.engine.model.config import ModelConfig

_FOLD_ROWS = 32
"""Up to this many query rows a sequence's query heads are folded into rows; above, heads stay apart."""


class KVCache:
    """K and V of all layers, allocated once. Fresh pages cost no memory until they are written."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (config.num_layers, 2, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        # Zeros, not empty: a masked slot that was never written must not hold NaN. calloc keeps it lazy.
        storage = torch.zeros(shape, dtype=dtype, device=device)
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
    """By sliding window: bool [q_len, context_len] (or [group * q_len, context_len] folded), or None."""


class PagedAttention:
    """Attention for one batch; made per step, called per layer (see `attention.base.Attention`)."""

    def __init__(self, config: ModelConfig, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.kv_heads = config.num_kv_heads
        self.group = config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.windows = config.layer_windows
        self.device = batch.token_ids.device
        self._num_tokens = len(batch.token_ids)
        self._spans = [self._plan(span) for span in batch.spans]
        self._write_at = self._slots(batch.spans)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.cache.layers[layer]
        if isinstance(self._write_at, slice):
            keys[:, self._write_at] = k.transpose(0, 1)
            values[:, self._write_at] = v.transpose(0, 1)
        else:
            keys.index_copy_(1, self._write_at, k.transpose(0, 1))
            values.index_copy_(1, self._write_at, v.transpose(0, 1))
        if len(self._spans) == 1:
            return self._attend(self._spans[0], layer, q, keys, values)
        out = q.new_empty((self._num_tokens, self.kv_heads * self.group * self.head_dim))
        for span in self._spans:
            out[span.rows] = self._attend(span, layer, q[span.rows], keys, values)
        return out

    def _attend(
        self, span: _SpanPlan, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """q [q_len, heads, head_dim] → [q_len, heads * head_dim]."""
        k, v = self._read(span, keys), self._read(span, values)
        mask = span.masks[self.windows[layer]]
        n, group, kv_heads = span.q_len, self.group, self.kv_heads
        if n <= _FOLD_ROWS:
            # [1, kv_heads, group * q_len, head_dim]: rows of one KV head's group behind each other.
            rows = q.view(n, kv_heads, group, -1).permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, -1)
            out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask)
            return out.view(kv_heads, group, n, -1).permute(2, 0, 1, 3).reshape(n, -1)
        # [kv_heads, group, q_len, head_dim] against keys that all heads of the group read without a copy.
        heads = q.view(n, kv_heads, group, -1).permute(1, 2, 0, 3)
        k = k[:, None].expand(-1, group, -1, -1)
        v = v[:, None].expand(-1, group, -1, -1)
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, is_causal=mask is None)
        return out.permute(2, 0, 1, 3).reshape(n, -1)

    def _read(self, span: _SpanPlan, storage: torch.Tensor) -> torch.Tensor:
        """The span's keys or values, [kv_heads, context_len, head_dim]."""
        if span.view is not None:
            return storage[:, span.view]
        assert span.blocks is not None
        paged = storage.view(self.kv_heads, self.cache.num_blocks, self.cache.block_size * self.head_dim)
        gathered = paged.index_select(1, span.blocks).view(self.kv_heads, -1, self.head_dim)
        return gathered[:, : span.context_len]

    def _plan(self, span: SeqSpan) -> _SpanPlan:
        size = self.cache.block_size
        used = span.block_table[: -(-span.context_len // size)]
        first = used[0]
        view = blocks = None
        if used[-1] - first == len(used) - 1 and used == list(range(first, first + len(used))):
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
        """True where a row may look. None where every row sees everything, and for a whole prefill, which is
        causal from position 0 and has a kernel of its own."""
        n, context = span.q_len, span.context_len
        folded = n <= _FOLD_ROWS
        if window is None or context <= window:
            window = None
            if n == 1 or (not folded and n == context):
                return None
        position = torch.arange(context - n, context, device=self.device)[:, None]
        key = torch.arange(context, device=self.device)
        mask = key <= position
        if window is not None:
            mask &= key > position - window
        return mask.repeat(self.group, 1) if folded else mask

    def _slots(self, spans: list[SeqSpan]) -> slice | torch.Tensor:
        """Where the batch's rows go: a slice when they are neighbours, else slot numbers int64 [T]."""
        size = self.cache.block_size
        slots: list[int] = []
        for span in spans:
            for position in range(span.context_len - span.q_len, span.context_len):
                slots.append(span.block_table[position // size] * size + position % size)
        if slots[-1] - slots[0] == len(slots) - 1 and all(
            b - a == 1 for a, b in zip(slots, slots[1:], strict=False)
        ):
            return slice(slots[0], slots[-1] + 1)
        return torch.tensor(slots, device=self.device)
