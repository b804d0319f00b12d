"""The decoder's building blocks, each in the form that its device computes fastest.

On a CPU, a product with few rows takes as long as reading its weights takes. oneDNN reads its own blocked layout at
the memory's full speed and row-major weights at half of it, so weights are packed once, in place of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this dtype are to be packed: bfloat16, on a CPU that oneDNN computes it on.

    Not float32, although it would gain as much: oneDNN's packed sums round differently from the row-major ones of
    the reference, by up to 1.5e-4 in SmolLM2's logits, and float32 is there to be compared.
    """
    return (
        dtype == torch.bfloat16
        and device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class Linear:
    """x Wᵀ + b: [T, in] → [T, out]."""

    __slots__ = ("_packed_product", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        """[out, in]. Rows, until `pack`; then opaque (`to_dense` gives rows again, as a copy)."""
        self.bias = bias
        """[out]"""
        self._packed_product: Callable[..., torch.Tensor] | None = None

    def pack(self) -> None:
        """Replaces the rows by oneDNN's layout; only if `can_pack`."""
        # Looked up here, not at import: builds of torch without oneDNN lack these operators.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
        self._packed_product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed_product is not None:
            return self._packed_product(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · w over the last dimension (Zhang & Sennrich 2019), computed in float32 or wider."""

    __slots__ = ("_root", "_scale", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        """[H]"""
        self.eps = eps
        self._scale: torch.Tensor | None = None
        self._root: torch.Tensor | None = None

    def prepare(self) -> None:
        """On a CPU, where torch's `rms_norm` is nine operations: the constants of a form that has five.

        With n values, sqrt(mean(x²) + eps) is hypot(‖x‖, sqrt(n eps)) / sqrt(n).
        """
        if self.weight.device.type == "cpu":
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self._scale = self.weight.to(dtype) * self.weight.shape[-1] ** 0.5
            self._root = torch.tensor((self.weight.shape[-1] * self.eps) ** 0.5, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._scale is None or self._root is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(self._scale.dtype)
        norm = torch.hypot(torch.linalg.vector_norm(wide, 2, -1, True), self._root)
        return (wide / norm).mul_(self._scale).to(x.dtype)
