"""Threads as in the engine's tests."""

from tests.engine.conftest import threads

__all__ = ["threads"]
