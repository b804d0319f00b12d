"""Attention of few rows per sequence (decodes, verified drafts, the rest of a cached prompt), many sequences at once.

What sequences have in common is read once: the rows of all of them go through one product with the keys of their
common prefix, then each through its own remainder, and the two results are merged by their log-sum-exps (as in
cascade attention, Ye et al. 2024, and FlashDecoding's split keys). A sequence by itself profits too: the run of
blocks it got from the prefix cache is read in place, and only what lies elsewhere is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import SeqSpan

_FEWEST_SHARED_BLOCKS = 4
"""A shorter common run is not worth a product of its own."""
_LONG_OWN = 256
"""Remainders of more tokens than this are read in place one by one, where that needs no gather."""


@dataclass(slots=True)
class _Own:
    """One sequence's remainder, read in place."""

    slots: slice
    mask: torch.Tensor | None
    """[1, 1, group * n, length], added to the scores; None if every row sees everything."""


class ShortGroup:
    """Spans of one length n, planned once per step. B spans, G query heads per KV head.

    rows: where the spans' rows lie in the batch, int64 [B * n], or a slice of it.
    """

    def __init__(
        self,
        spans: list[SeqSpan],
        num_blocks: int,
        block_size: int,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n = spans[0].q_len
        self.count = len(spans)
        self.rows = self._rows(spans, device)
        self._num_blocks, self._size, self._group = num_blocks, block_size, group
        self._dtype, self._device = dtype, device
        # Only torch's CPU kernel hands out the log-sum-exps that merging needs.
        shared = self._shared_blocks(spans) if device.type == "cpu" else 0
        start = spans[0].block_table[0] * block_size
        self._shared = slice(start, start + shared * block_size) if shared else None
        self._own: list[_Own] | None = None
        tables = [s.block_table[shared : -(-s.context_len // block_size)] for s in spans]
        lengths = [s.context_len - shared * block_size for s in spans]
        if all(_consecutive(t) for t in tables) and (self.count == 1 or max(lengths) > _LONG_OWN):
            self._own = [
                _Own(slice(t[0] * block_size, t[0] * block_size + length), self._mask([length], length))
                for t, length in zip(tables, lengths, strict=True)
            ]
        else:
            widest = max(map(len, tables))
            ids = [block for t in tables for block in (*t, *[t[0]] * (widest - len(t)))]
            self._gather = torch.tensor(ids, device=device)
            self._own_mask = self._mask(lengths, widest * block_size)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [B * n, heads, head_dim], K and V [kv_heads, num_slots, head_dim] → [B * n, heads * head_dim]."""
        kv_heads, _, dim = keys.shape
        b, n, g = self.count, self.n, self._group
        # [B, kv_heads, G * n, head_dim]: heads that share a KV head are rows of one product.
        rows = q.view(b, n, kv_heads, g, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, g * n, dim)
        if self._own is not None:
            parts = [
                self._attend_own(
                    rows[i : i + 1], keys[None, :, own.slots], values[None, :, own.slots], own.mask
                )
                for i, own in enumerate(self._own)
            ]
            out = parts[0][0] if b == 1 else torch.cat([o for o, _ in parts])
            lse = parts[0][1] if b == 1 or self._shared is None else torch.cat([s for _, s in parts])
        else:
            out, lse = self._attend_own(rows, self._gathered(keys), self._gathered(values), self._own_mask)
        if self._shared is not None:
            together = rows.transpose(0, 1).reshape(1, kv_heads, b * g * n, dim)
            prefix, prefix_lse = _attend(together, keys[None, :, self._shared], values[None, :, self._shared])
            prefix = prefix.reshape(kv_heads, b, g * n, dim).transpose(0, 1)
            prefix_lse = prefix_lse.reshape(kv_heads, b, g * n).transpose(0, 1)
            weight = torch.sigmoid(prefix_lse - lse)[..., None]
            out = torch.lerp(out, prefix, weight.to(out.dtype))
        return out.view(b, kv_heads, g, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, -1)

    def _attend_own(
        self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._shared is not None:
            return _attend(rows, k, v, mask)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        return out, out  # no log-sum-exp is needed

    def _gathered(self, storage: torch.Tensor) -> torch.Tensor:
        """[kv_heads, num_slots, head_dim] → [B, kv_heads, widest, head_dim]."""
        kv_heads, _, dim = storage.shape
        paged = storage.view(kv_heads, self._num_blocks, self._size * dim)
        return paged.index_select(1, self._gather).view(kv_heads, self.count, -1, dim).transpose(0, 1)

    def _shared_blocks(self, spans: list[SeqSpan]) -> int:
        """Leading blocks that all spans have in common, that follow each other, and that all rows see whole."""
        first = spans[0].block_table
        most = min((s.context_len - s.q_len) // self._size for s in spans)
        if self.count == 1 and _consecutive(first[: -(-spans[0].context_len // self._size)]):
            return 0
        count = 0
        while count < most and all(s.block_table[count] == first[0] + count for s in spans):
            count += 1
        return count if count >= _FEWEST_SHARED_BLOCKS else 0

    def _mask(self, lengths: list[int], width: int) -> torch.Tensor | None:
        """[B, 1, G * n, width]: the last n of each span's `lengths` positions look back, nobody looks at padding."""
        if self.n == 1 and lengths == [width]:
            return None
        last = torch.tensor(lengths, device=self._device)[:, None, None] - self.n
        row = torch.arange(self.n, device=self._device)[None, :, None]
        key = torch.arange(width, device=self._device)
        mask = torch.zeros(len(lengths), self.n, width, dtype=self._dtype, device=self._device)
        mask.masked_fill_(key > last + row, -torch.inf)
        return mask.repeat(1, self._group, 1)[:, None]

    def _rows(self, spans: list[SeqSpan], device: torch.device) -> slice | torch.Tensor:
        rows = [r for s in spans for r in range(s.q_start, s.q_start + s.q_len)]
        if _consecutive(rows):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=device)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, H, R, D], k and v [B, H, S, D] → (attention [B, H, R, D], log-sum-exp of the scores [B, H, R])."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)
    return out, lse


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
