"""One server for the tests that only talk to it; tests that break it start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .models import write_model
from .running import Running, running


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "byte-level")


@pytest.fixture(scope="session")
def shared_server(model_folder: Path) -> Iterator[Running]:
    with running(model_folder) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server, quick and without a memory of the tests before."""
    backend = shared_server.backend
    backend.per_step, backend.first, backend.gap, backend.stopped = 1, 0.0, 0.0, False
    shared_server.says("The quick brown fox jumps over the lazy dog.")
    backend.requests.clear()
    backend.aborted.clear()
    yield shared_server
    shared_server.until(lambda: not backend.live, "no request is running")
