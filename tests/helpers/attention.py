"""Textbook attention with a cache, for one sequence: the reference that the paged one and the decoder are held to."""

from __future__ import annotations

import torch


class PlainAttention:
    """Keeps K and V of all positions so far, and attends over them with an explicit mask and softmax.

    windows: per layer, how many tokens a token sees, itself included; None: all before it.
    """

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self.cache:
            k, v = (torch.cat((old, new)) for old, new in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = (k, v)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = distance < 0
        if (window := self.windows[layer]) is not None:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).flatten(1)
