"""Rotary position embedding: the angles of each position, as a table."""

from __future__ import annotations

import math

import torch

from firsttoken.engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2].

    RoFormer (Su et al. 2021): theta^(-2i / head_dim), then scaled as `rope.type` says.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1 (Meta's reference code): frequencies of few turns over the original context are divided by the
    factor, those of many are kept, those between are blended by their number of turns."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023), section 3.2: over the dimensions, a ramp from kept to divided by the factor."""

    def dimension_of(turns: float) -> float:
        """The pair that turns this often over the original context (inverse of the frequency formula)."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * divided + frequencies * (1 - divided)


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """cos and sin of every position: float32 [num_positions, 2, head_dim / 2].

    A table, so that a position is rotated by the same bits whatever batch it is in.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.stack((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)
