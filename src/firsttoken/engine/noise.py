"""Keyed sampling noise: the same bits for the same key on every device, in every batch.

The Gumbel-max trick: argmax(logits / T + g) is a sample of softmax(logits / T) when every g is standard Gumbel
noise. Here g of a token is a function of (seed, choice index, absolute position, token id) alone. So a text
depends neither on what else is in the batch nor on speculation, and a draft that is sampled with the same noise
agrees with the target more often than one sampled with its own.
"""

from __future__ import annotations

import torch

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def row_key(seed: int, choice_index: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for one position of one sequence: SplitMix64 (Steele et al., 2014) over the triple."""
    state = seed & _MASK64
    for value in (choice_index, position):
        state = (state + 0x9E3779B97F4A7C15 * (2 * value + 1)) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state & _MASK32, state >> 32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers with low bias ("lowbias32", C. Wellons, hash-prospector), in place on int64
    values below 2^32. Products overflow int64, but their low 32 bits are right, and only those are kept."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _MASK32
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _MASK32
    x ^= x >> 16
    return x


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gumbel noise [R, V] for `keys` int64 [R, 2] (from `row_key`) and `token_ids` int64 [V] or [R, V].

    With u uniform in (0, 1), -log1p(-u) is exponential and exact where it matters: near 0, where the largest
    Gumbel values come from, floats are dense.
    """
    bits = _mix(token_ids + keys[:, 0:1] & _MASK32)
    bits = _mix(bits ^ keys[:, 1:2])
    uniform = bits.to(dtype).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
