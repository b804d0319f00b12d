"""Threads for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny models, whose products are shorter than the hand-over to a second one."""
    before = torch.get_num_threads()
    if "smollm2" not in request.module.__name__:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
