"""The engine: tokens in, tokens out. Knows nothing of HTTP, text or databases.

Importing this package, `engine.request` or `engine.config` does not import torch, so that the HTTP process
can share the types; `Engine` is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.request import FinishReason, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from firsttoken.engine.engine import Engine

__all__ = ["Engine", "EngineConfig", "FinishReason", "Request", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from firsttoken.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
