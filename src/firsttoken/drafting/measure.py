"""What a draft brings on this machine, measured in the engine: acceptance by category and temperature, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.engine import Engine, SpeculatorFactory
from firsttoken.engine.request import Request, SamplingParams


@dataclass(frozen=True)
class Measured:
    """One category at one temperature."""

    category: str
    temperature: float
    acceptance_rate: float
    """Accepted over drafted tokens."""
    tokens_per_cycle: float
    per_position: list[float]
    """Chance that draft i stands if those before it did."""
    speedup: float
    """Output tokens per second over those without speculation, in the same run."""


def measure_draft(
    model: Path,
    draft: str,
    prompts: dict[str, list[list[int]]],
    *,
    make_speculator: SpeculatorFactory,
    gamma: int = 5,
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
    max_tokens: int = 128,
    concurrency: int = 1,
    on_progress: Callable[[int, int, str], None] = lambda done, total, word: None,
) -> list[Measured]:
    """prompts: token ids by category. Every prompt is answered with and without drafts, one after the other."""
    engine = Engine(EngineConfig(model=str(model), speculation="off"), make_speculator=make_speculator)
    engine.warmup()
    found: list[Measured] = []
    total = len(temperatures) * len(prompts)
    for temperature in temperatures:
        for category, texts in prompts.items():
            on_progress(len(found), total, f"{category}, T = {temperature:g}")
            sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=max_tokens)
            on: dict[str, Any] = {
                "draft": draft,
                "speculation": "always",
                "num_speculative_tokens": gamma,
            }
            plain = _tokens_per_second(engine, {"speculation": "off"}, texts, sampling, concurrency)
            before = _counters(engine)
            drafted = _tokens_per_second(engine, on, texts, sampling, concurrency)
            found.append(_measured(category, temperature, before, _counters(engine), drafted / plain))
    on_progress(total, total, "")
    return found


def _tokens_per_second(
    engine: Engine,
    settings: dict[str, Any],
    prompts: list[list[int]],
    sampling: SamplingParams,
    concurrency: int,
) -> float:
    engine.reconfigure(settings)
    engine.reset_prefix_cache()
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(prompts), concurrency):
        for i, ids in enumerate(prompts[first : first + concurrency]):
            engine.add_request(Request(request_id=f"m{i}", prompt_token_ids=ids, sampling=sampling))
        while engine.has_work():
            tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens / (time.perf_counter() - started)


def _counters(engine: Engine) -> dict[str, Any]:
    stats = engine.stats()
    return {
        "drafts": stats["num_drafts"],
        "drafted": list(stats["draft_tokens_per_pos"]),
        "accepted": list(stats["accepted_tokens_per_pos"]),
    }


def _measured(
    category: str, temperature: float, before: dict[str, Any], after: dict[str, Any], speedup: float
) -> Measured:
    def difference(name: str) -> list[int]:
        old = before[name] + [0] * (len(after[name]) - len(before[name]))
        return [a - b for a, b in zip(after[name], old, strict=True)]

    cycles, drafted, accepted = (
        after["drafts"] - before["drafts"],
        difference("drafted"),
        difference("accepted"),
    )
    accepted += [0] * (len(drafted) - len(accepted))
    reached = [cycles, *accepted[:-1]]
    return Measured(
        category=category,
        temperature=temperature,
        acceptance_rate=sum(accepted) / max(sum(drafted), 1),
        tokens_per_cycle=1 + sum(accepted) / max(cycles, 1),
        per_position=[a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)],
        speedup=speedup,
    )
