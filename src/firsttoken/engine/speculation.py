"""What the engine asks of drafts; `firsttoken.speculate` answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from firsttoken.engine.config import EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.runner import Runner
from firsttoken.engine.sequence import Sequence


@dataclass(slots=True)
class Computed:
    """What a step computed of one sequence, for a drafter that reads the model's states."""

    seq: Sequence
    start: int
    stop: int
    """The sequence's tokens [start, stop) have been computed and stand; rejected drafts are not among them."""
    block_table: list[int]
    """The sequence's own is already gone if it ended with this step; its blocks still hold what they held."""
    states: torch.Tensor | None
    """[n, C * H], n >= stop - start: the residual stream before each of the C captured layers, side by side; None
    without any."""


class Speculator(Protocol):
    """Drafts for decoding sequences, and the choice of how many."""

    capture: tuple[int, ...]
    """Layers before which the model's residual stream is wanted (see `computed`), ascending; often none."""

    @property
    def lookahead(self) -> int:
        """Tokens for which each sequence should have blocks, from its last known one on, when `propose` is
        called."""

    def computed(self, items: list[Computed], *, prompts_wait: bool) -> None:
        """Called after the step's outputs have been handed over. prompts_wait: somebody's first token is next, so
        what can wait should."""

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        """Drafts for each sequence, at most `budget` tokens in all; an empty list where none is worth it."""

    def observe(self, seq: Sequence, drafts: list[int], num_accepted: int) -> None:
        """Called after a verification with the number of drafts that stood."""

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Called after a pure decode or verification step."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""

    def describe(self) -> dict[str, Any]:
        """Whether drafts are used, how many, and why: words and numbers for logs, metrics and the benchmark."""


SpeculatorFactory = Callable[[EngineConfig, CostModel, Runner], Speculator | None]
