"""Engine processes that tests start find the scripted engine, as the tests themselves do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _processes_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT + os.pathsep + os.environ.get("PYTHONPATH", ""))
