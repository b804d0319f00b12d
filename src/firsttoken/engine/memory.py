"""Memory that costs nothing until it is written."""

from __future__ import annotations

import math
import mmap

import torch


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU their pages are the system's own, which takes a page from memory when it is first written:
    `torch.zeros` writes every one, and a KV cache of 1 GiB would be resident before the first request."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < 1 << 20:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
