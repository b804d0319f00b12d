"""What a forward pass is given: the batch, flattened, and the seam to attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class SeqSpan:
    """One sequence's part of a batch: rows [q_start, q_start + q_len) of the flattened tokens."""

    q_start: int
    q_len: int
    context_len: int
    """Tokens the last row sees, itself included: positions [context_len - q_len, context_len) are computed."""
    block_table: list[int]
    """Block ids in order of position; block i holds positions [i * block_size, (i + 1) * block_size)."""


@dataclass(slots=True)
class Batch:
    """A step's tokens as tensors. T rows in all; sequences lie one behind the other, there is no padding."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    spans: list[SeqSpan]


class Attention(Protocol):
    """Attention over the paged cache for one batch. Called once per layer by the decoder."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k, v [T, num_kv_heads, head_dim] into the cache of `layer`, then attends causally.

        q [T, num_heads, head_dim], RoPE applied to q and k; returns [T, num_heads * head_dim].
        """
