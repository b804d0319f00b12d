"""The decoder's building blocks, each in the form that its device computes fastest.

On a CPU, products with few rows take as long as reading their weights takes. oneDNN reads its own blocked layout at
the memory's full speed and row-major weights at half of it, so weights are packed once, in place of the rows. A row
of a packed bfloat16 product has the same bits whatever rows are computed with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_pack = torch.ops.mkldnn._reorder_linear_weight
_packed_linear = torch.ops.mkldnn._linear_pointwise.default


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has blocked layouts for this dtype on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """x Wᵀ + b: [T, in] → [T, out]."""

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        """[out, in]. Rows, until `pack`; then opaque (`to_dense` gives rows again, as a copy)."""
        self.bias = bias
        """[out]"""
        self._packed = False

    def pack(self) -> None:
        """Replaces the rows by oneDNN's layout; only if `can_pack`."""
        self.weight = _pack(self.weight, None)
        self._packed = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = _packed_linear(x, self.weight, self.bias, "none", [], "")
            return y
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
