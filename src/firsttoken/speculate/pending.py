"""Captured states of computed tokens on their way into a draft's cache, by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed


@dataclass(slots=True)
class Pending:
    """Computed tokens that are not yet in the draft's cache: positions [start, stop)."""

    start: int
    stop: int
    states: list[torch.Tensor] = field(default_factory=list)
    """Each [n, C * H]; together stop - start rows. Without any where a draft needs no states."""


class PendingStates:
    """For drafts on the target's blocks that are written a block at a time.

    States wait until their block is full, or until drafts are wanted. A full block can be found by its hash, so it
    must hold the draft's part by the time the next step looks: `take` names those that are due.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._pending: dict[Sequence, Pending] = {}
        self._ended: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._pending)

    def take(self, items: list[Computed]) -> Iterator[tuple[Computed, Pending]]:
        """Adds a step's states; yields the sequences that have filled a block."""
        for item in items:
            assert item.states is not None
            pending = self._pending.get(item.seq)
            if pending is None or pending.stop != item.start:
                # New, or computed again after a preemption: whole blocks up to here hold the rest.
                assert item.start % self._size == 0
                pending = self._pending[item.seq] = Pending(item.start, item.start)
            if item.stop > item.start:
                pending.states.append(item.states[: item.stop - item.start])
                pending.stop = item.stop
            if pending.stop // self._size > pending.start // self._size:
                yield item, pending
        for seq in self._ended:
            self._pending.pop(seq, None)
        self._ended.clear()

    def forget(self, seq: Sequence) -> None:
        # Not at once: the last states of a sequence that ends with a step come after its end, and fill a block.
        self._ended.append(seq)

    def of(self, seq: Sequence) -> Pending:
        return self._pending[seq]

    def ready(self, seq: Sequence) -> bool:
        """Whether the states of all of the sequence's computed tokens are here."""
        pending = self._pending.get(seq)
        return pending is not None and pending.stop == seq.num_computed_tokens
