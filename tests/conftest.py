"""Fixtures and rules for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from firsttoken import models

# No test is decided by time: a slow machine is no bug.
hypothesis.settings.register_profile("firsttoken", deadline=None)
hypothesis.settings.load_profile("firsttoken")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: those of the tests must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_ALL = os.environ.get("REQUIRE_ALL") == "1"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the built-in model smollm2-135m; the test is skipped where it has not been fetched."""
    if not (models.home() / "models" / "smollm2-135m" / "config.json").exists():
        pytest.skip("smollm2-135m has not been fetched: firsttoken pull smollm2-135m")
    return models.resolve("smollm2-135m")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, pytest.TestReport]:
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, Any, pytest.CollectReport]:
    return _no_skip((yield))


def _no_skip(report: Any) -> Any:
    """REQUIRE_ALL=1, as in CI: what would be skipped for want of something fails instead, with the reason."""
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_ALL=1, and this was not run: {reason}"
    return report
