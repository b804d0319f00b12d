"""Attention of few rows per sequence (decodes, verified drafts, the rest of a cached prompt), many sequences at once.

What sequences have in common is read once: the rows of all of them go through one product with the keys of their
common prefix, then each through its own remainder, and one softmax goes over both parts (the idea of cascade
attention, Ye et al. 2024, without its merging of two softmaxes).

On a CPU every product is a plain batched one, scores and probabilities in the model's dtype with the softmax between
them in float32. Keys and values are first copied to where they are dense: oneDNN reads such a batch as it is,
while torch would otherwise transpose it in memory, which takes longer than the product. torch's fused kernel reads the
cache in place and is still slower, by a third with 18 rows over 672 keys and half with 72.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import SeqSpan

_FEWEST_SHARED_BLOCKS = 4
"""A shorter common run is not worth a product of its own."""


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
        self._fused = device.type != "cpu"
        shared = self._shared_blocks(spans)
        start = spans[0].block_table[0] * block_size
        self._shared = slice(start, start + shared * block_size) if shared else None
        tables = [s.block_table[shared : -(-s.context_len // block_size)] for s in spans]
        lengths = [s.context_len - shared * block_size for s in spans]
        self._own: slice | torch.Tensor
        """The remainders: slots of a single one whose blocks are consecutive, else all blocks, int64."""
        if self.count == 1 and _consecutive(tables[0]):
            width = lengths[0]
            first = tables[0][0] * block_size
            self._own = slice(first, first + width)
        else:
            widest = max(map(len, tables))
            width = widest * block_size
            ids = [block for t in tables for block in (*t, *[t[0]] * (widest - len(t)))]
            self._own = torch.tensor(ids, device=device)
        # Every row sees the keys before this one.
        self._seen = 0 if self._fused else max(0, min(lengths) - self.n + 1)
        self._mask = self._hidden(lengths, width)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [B * n, heads, head_dim], K and V [kv_heads, num_slots, head_dim] → [B * n, heads * head_dim]."""
        kv_heads, _, dim = keys.shape
        b, n, g = self.count, self.n, self._group
        # Heads that share a KV head are rows of one product.
        rows = q.view(b, n, kv_heads, g, dim).permute(2, 0, 3, 1, 4)
        if self._fused:
            out = self._attend_fused(rows.reshape(kv_heads, b, g * n, dim), keys, values)
        else:
            out = self._attend_dense((rows * dim**-0.5).reshape(kv_heads, b * g * n, dim), keys, values)
        return out.view(kv_heads, b, g, n, dim).permute(1, 3, 0, 2, 4).reshape(b * n, -1)

    def _attend_dense(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [kv_heads, B * G * n, head_dim], scaled → the same shape."""
        kv_heads, num_rows, dim = q.shape
        b, r = self.count, num_rows // self.count
        own = self._read_own(keys)
        scores = torch.bmm(q.view(kv_heads * b, r, dim), own.transpose(1, 2))
        if self._mask is not None:
            scores.view(kv_heads, b, r, -1)[..., self._seen :] += self._mask
        if self._shared is None:
            return torch.bmm(scores.softmax(-1), self._read_own(values))
        prefix = torch.bmm(q, keys[:, self._shared].contiguous().transpose(1, 2))
        width = prefix.shape[-1]
        likely = torch.cat((prefix, scores.view(kv_heads, num_rows, -1)), -1).softmax(-1)
        out = torch.bmm(likely[..., :width], values[:, self._shared].contiguous())
        rest = likely[..., width:].reshape(kv_heads * b, r, -1)
        return out.add_(torch.bmm(rest, self._read_own(values)).view(kv_heads, num_rows, dim))

    def _attend_fused(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [kv_heads, B, G * n, head_dim] → the same shape."""
        shape = (q.shape[0], self.count, -1, q.shape[-1])
        k, v = self._read_own(keys).view(shape), self._read_own(values).view(shape)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)

    def _read_own(self, storage: torch.Tensor) -> torch.Tensor:
        """[kv_heads, num_slots, head_dim] → [kv_heads * B, width, head_dim], dense."""
        if isinstance(self._own, slice):
            return storage[:, self._own].contiguous()
        kv_heads, _, dim = storage.shape
        paged = storage.view(kv_heads, self._num_blocks, self._size * dim)
        return paged.index_select(1, self._own).view(kv_heads * self.count, -1, dim)

    def _shared_blocks(self, spans: list[SeqSpan]) -> int:
        """Leading blocks that all spans have in common, that follow each other, and that all rows see whole."""
        if self._fused or self.count == 1:
            return 0
        first = spans[0].block_table
        most = min((s.context_len - s.q_len) // self._size for s in spans)
        count = 0
        while count < most and all(s.block_table[count] == first[0] + count for s in spans):
            count += 1
        return count if count >= _FEWEST_SHARED_BLOCKS else 0

    def _hidden(self, lengths: list[int], width: int) -> torch.Tensor | None:
        """[B, G * n, width - seen], added to the scores of the keys that not every row sees: the last n of each span's
        `lengths` positions look back, nobody looks at padding."""
        if self._seen >= width or (self.n == 1 and lengths == [width]):
            return None
        last = torch.tensor(lengths, device=self._device)[:, None, None] - self.n
        row = torch.arange(self.n, device=self._device)[None, :, None]
        key = torch.arange(self._seen, width, device=self._device)
        mask = torch.zeros(len(lengths), self.n, width - self._seen, dtype=self._dtype, device=self._device)
        mask.masked_fill_(key > last + row, -torch.inf)
        return mask.repeat(1, self._group, 1)

    def _rows(self, spans: list[SeqSpan], device: torch.device) -> slice | torch.Tensor:
        rows = [r for s in spans for r in range(s.q_start, s.q_start + s.q_len)]
        if _consecutive(rows):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=device)


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
