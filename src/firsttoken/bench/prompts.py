"""The fixed prompt set: real-time chat with a shared system prompt, so that figures can be compared."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn under the shared system prompt."""

    name: str
    """`chat-03`: category and place in the file."""
    category: str
    turn: str
    system: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.turn}]


@dataclass(frozen=True, slots=True)
class PromptSet:
    version: int
    system: str
    measured: tuple[Prompt, ...]
    warmup: tuple[Prompt, ...]
    """Shares neither system prompt nor turns with `measured`."""

    def pick(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, the categories in turn and each in an order drawn from `seed`; the same for every
        stage. More than there are: the set again, from the start."""
        draw = random.Random(seed)
        piles: dict[str, list[Prompt]] = {}
        for prompt in self.measured:
            piles.setdefault(prompt.category, []).append(prompt)
        for pile in piles.values():
            draw.shuffle(pile)
        order = list(_round_robin(list(piles.values())))
        return [order[i % len(order)] for i in range(count)]


def _round_robin(piles: list[list[Prompt]]) -> Iterator[Prompt]:
    for place in range(max(map(len, piles))):
        for pile in piles:
            if place < len(pile):
                yield pile[place]


@cache
def load() -> PromptSet:
    """Reads the set that ships with the package."""
    data = tomllib.loads((files("firsttoken.bench") / "data" / "prompts.toml").read_text(encoding="utf-8"))
    system = data["system"].strip()
    measured = tuple(
        Prompt(f"{category}-{number:02}", category, turn, system)
        for category, turns in data["turns"].items()
        for number, turn in enumerate(turns, start=1)
    )
    warmup = tuple(
        Prompt(f"warmup-{number:02}", "warmup", turn, data["warmup_system"])
        for number, turn in enumerate(data["warmup"], start=1)
    )
    return PromptSet(data["version"], system, measured, warmup)
