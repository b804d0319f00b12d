"""Zeros that take memory only where they are written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from firsttoken.engine.memory import lazy_zeros

CPU = torch.device("cpu")


def test_they_are_zeros_that_can_be_written():
    for shape in ((3, 5), (7, 1 << 18)):  # small ones and ones in pages of their own
        zeros = lazy_zeros(shape, torch.bfloat16, CPU)
        assert zeros.shape == shape
        assert not zeros.any()
        zeros[1, 2:4] = 1
        assert float(zeros.float().sum()) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_taken_when_it_is_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 1 << 30
    before = resident()
    zeros = lazy_zeros((size,), torch.uint8, CPU)
    assert resident() - before < size / 16
    zeros[: size // 8] = 1
    assert resident() - before >= size / 8
