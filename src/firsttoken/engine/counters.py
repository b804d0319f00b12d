"""What the engine has done since its start, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Fields of `backends.base.EngineStats` of the same names, where each is described."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_tokens_per_pos: list[int] = field(default_factory=list)
    accepted_tokens_per_pos: list[int] = field(default_factory=list)
    emitted_tokens_per_pos: list[int] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    step_seconds: float = 0.0

    def add_drafts(self, drafted: int, accepted: int, emitted: int) -> None:
        """One verification of `drafted` tokens, of which `accepted` stood, and `emitted` tokens came out."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        _count_up(self.draft_tokens_per_pos, drafted)
        _count_up(self.accepted_tokens_per_pos, accepted)
        _count_up(self.emitted_tokens_per_pos, emitted)


def _count_up(per_position: list[int], count: int) -> None:
    per_position.extend([0] * (count - len(per_position)))
    for i in range(count):
        per_position[i] += 1
