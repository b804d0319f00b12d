"""Engine + drafter, as the settings ask for: what the engine process and in-process users start from."""

from __future__ import annotations

from collections.abc import Callable

from firsttoken.backends.process import available_cores
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.engine import Engine


def create_engine(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Engine:
    """A loaded engine (not warmed up). Raises ConfigError with one line if a setting cannot work."""
    import torch

    from firsttoken.speculate.select import draft_memory, make_speculator

    try:
        torch.set_num_threads(config.num_threads or available_cores())
    except (RuntimeError, ValueError) as e:
        raise ConfigError(f"--num-threads {config.num_threads}: {e}") from None
    return Engine(config, make_speculator=make_speculator, draft_memory=draft_memory, on_progress=on_progress)
