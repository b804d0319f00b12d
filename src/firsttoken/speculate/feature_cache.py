"""The feature draft's memory: its KV on the target's block ids, and the state from which each block goes on.

For a sequence with n computed tokens the slots 1 … n - 1 are written, and the `carry` of the block of token n - 1
holds the fused state of that token. Both depend on tokens before n only, so they belong to the blocks' hashes as the
target's KV does: whoever finds a block finds its slots and its carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firsttoken.engine.memory import lazy_zeros
from firsttoken.speculate.feature_draft import FeatureDraft
from firsttoken.speculate.pending import Pending


@dataclass(slots=True)
class Advance:
    """One sequence's part of a pass: `pending` goes into the cache; with `query`, the slot of the last known token,
    which may have no block yet, is computed too, for drafting from it."""

    token_ids: list[int]
    block_table: list[int]
    pending: Pending
    query: bool


class FeatureCache:
    def __init__(self, draft: FeatureDraft, num_blocks: int, block_size: int) -> None:
        self.draft = draft
        self.block_size = block_size
        self.num_blocks = num_blocks
        c = draft.config
        shape = (2, c.num_kv_heads, num_blocks * block_size, c.head_dim)
        self.keys, self.values = lazy_zeros(shape, draft.dtype, draft.device)
        """Each [kv_heads, num_slots, head_dim]."""
        self.carry = lazy_zeros((num_blocks, c.hidden_size), draft.dtype, draft.device)

    def advance(
        self, parts: list[Advance]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Writes every part's pending states, in one pass, and empties them. Returns (hidden [S, H], q, k, v) of the
        S query slots, or None without any."""
        size, device = self.block_size, self.draft.device
        fused = None
        states = [s for part in parts for s in part.pending.states]
        if states:
            fused = self.draft.fuse(torch.cat(states) if len(states) > 1 else states[0])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        written: list[int] = []  # rows whose K and V go into `slots`
        queries: list[int] = []
        hidden: list[torch.Tensor] = []
        carry_blocks: list[int] = []
        carry_rows: list[int] = []
        row = 0
        for part in parts:
            p, table = part.pending, part.block_table
            first, behind = max(p.start, 1), p.stop + part.query
            if p.start > 0 and behind > first:
                before = table[(p.start - 1) // size]
                hidden.append(self.carry[before : before + 1])
            count = p.stop - p.start
            # Slot i + 1 takes the state of token i; the last state waits in the carry unless its slot is asked for.
            used = count - (not part.query)
            if fused is not None and used > 0:
                hidden.append(fused[row : row + used])
            at = len(tokens)
            tokens += part.token_ids[first:behind]
            positions.extend(range(first, behind))
            written.extend(range(at, at + p.stop - first))
            slots += [table[i // size] * size + i % size for i in range(first, p.stop)]
            if part.query:
                queries.append(len(tokens) - 1)
            if count:
                ends = [*range(p.start + size - 1 - p.start % size, p.stop - 1, size), p.stop - 1]
                carry_blocks += [table[i // size] for i in ends]
                carry_rows += [row + i - p.start for i in ends]
            row += count
            p.start, p.states = p.stop, []
        result = None
        if tokens:
            x = torch.cat(hidden)
            q, k, v = self.draft.project(
                torch.tensor(tokens, device=device), x, torch.tensor(positions, device=device)
            )
            if len(written) == len(tokens):
                self._write(slots, k, v)
            elif written:
                rows = torch.tensor(written, device=device)
                self._write(slots, k.index_select(0, rows), v.index_select(0, rows))
            if queries:
                if len(queries) < len(tokens):
                    rows = torch.tensor(queries, device=device)
                    x, q, k, v = (t.index_select(0, rows) for t in (x, q, k, v))
                result = (x, q, k, v)
        if carry_blocks:
            assert fused is not None
            # After the carries have been read above: a sequence may stay within its block.
            self.carry[torch.tensor(carry_blocks, device=device)] = fused.index_select(
                0, torch.tensor(carry_rows, device=device)
            )
        return result

    def _write(self, slots: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        index = torch.tensor(slots, device=self.draft.device)
        self.keys.index_copy_(1, index, k.transpose(0, 1))
        self.values.index_copy_(1, index, v.transpose(0, 1))

    def read(
        self, tables: list[list[int]], lengths: list[int], room: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The slots 1 … length - 1 of S sequences, flush right before `room` free columns: K and V
        [S, kv_heads, W + room, head_dim], and what hides the padding at the left, [S, 1, 1, W + room], added to
        scores, or None without padding."""
        size, c = self.block_size, self.draft.config
        width = max(max(n - 1, 0) for n in lengths)
        shape = (len(tables), c.num_kv_heads, width + room, c.head_dim)
        k, v = self.keys.new_empty(shape), self.values.new_empty(shape)
        mask = None
        if any(n - 1 != width for n in lengths):
            mask = k.new_zeros((len(tables), 1, 1, width + room))
        for i, (table, n) in enumerate(zip(tables, lengths, strict=True)):
            pad = width - max(n - 1, 0)
            if pad and mask is not None:
                mask[i, ..., :pad] = -torch.inf
                k[i, :, :pad] = 0
                v[i, :, :pad] = 0
            if n <= 1:
                continue
            used = table[: -(-n // size)]
            first = used[0]
            if used == list(range(first, first + len(used))):
                begin, end = first * size + 1, first * size + n
                k[i, :, pad:width], v[i, :, pad:width] = self.keys[:, begin:end], self.values[:, begin:end]
            else:
                blocks = torch.tensor(used, device=k.device)
                for source, into in ((self.keys, k), (self.values, v)):
                    paged = source.view(c.num_kv_heads, self.num_blocks, size * c.head_dim)
                    gathered = paged.index_select(1, blocks).view(c.num_kv_heads, -1, c.head_dim)
                    into[i, :, pad:width] = gathered[:, 1:n]
        return k, v, mask
