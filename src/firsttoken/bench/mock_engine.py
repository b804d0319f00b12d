"""The make-believe engine of the mock server: what a request meets, what was seen, slots, a prefix cache."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

BLOCK = 16
"""Tokens per block of the make-believe prefix cache."""


@dataclass
class Behaviour:
    """What one request meets. Times in seconds; counts in tokens; None: never."""

    ttft: float = 0.05
    """Fixed part of the time to first token."""
    prefill: float = 0.0
    """Added per uncached prompt token; prefills take turns."""
    itl: float = 0.01
    jitter: float = 0.0
    """Each gap is drawn from itl · [1 − jitter, 1 + jitter]."""
    tokens: int = 32
    """Length of an answer without max_tokens."""
    tokens_per_chunk: int = 1
    role_first: bool = False
    """Send the role chunk at once, ahead of the first token (as many servers do)."""
    empty_first: bool = False
    """Send a content chunk with an empty string ahead of the first token."""
    ping: float | None = None
    """Send `: ping` comments this often before the first token."""
    status: int = 200
    error_after: int | None = None
    """After this many chunks of content: an error event inside the 200 stream."""
    die_after: int | None = None
    """After this many chunks of content: the connection is cut."""
    hang: bool = False
    """Never a byte."""

    def with_request(self, wishes: dict[str, Any]) -> Behaviour:
        known = {k: v for k, v in wishes.items() if k in self.__dataclass_fields__}
        for key in ("ttft", "itl", "prefill", "ping"):
            if f"{key}_ms" in wishes:
                known[key] = wishes[f"{key}_ms"] / 1e3
        return Behaviour(**{**self.__dict__, **known})


@dataclass
class Seen:
    """The account that tests compare a relay's ledger with."""

    id: str
    path: str
    stream: bool
    key: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    status: str = "running"
    """running, ok, disconnected (the client left), died, error."""


@dataclass
class Engine:
    """Slots, a queue and a prefix cache: enough of an engine that a benchmark's premises can hold or fail."""

    behaviour: Behaviour
    settings: dict[str, Any]
    prefixes: set[str] = field(default_factory=set)
    waiting: list[tuple[tuple[float, int], asyncio.Future[None]]] = field(default_factory=list)
    running: int = 0
    arrivals: int = 0
    counters: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("queries", "hits", "generated", "drafts", "drafted", "accepted", "prompt"), 0
        )
    )
    prefill_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, prompt_tokens: int) -> None:
        """Waits for a slot: in order of arrival, or with policy `deadline` short prompts first."""
        self.arrivals += 1
        if self.running < self.settings["max_num_seqs"] and not self.waiting:
            self.running += 1
            return
        rank = float(prompt_tokens) if self.settings["scheduling_policy"] == "deadline" else 0.0
        turn = asyncio.get_running_loop().create_future()
        entry = ((rank, self.arrivals), turn)
        self.waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self.waiting:
                self.waiting.remove(entry)
            elif turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self.running -= 1
        while self.waiting and self.running < self.settings["max_num_seqs"]:
            entry = min(self.waiting, key=lambda e: e[0])
            self.waiting.remove(entry)
            if not entry[1].done():
                self.running += 1
                entry[1].set_result(None)

    def match(self, words: list[str], salt: str | None) -> int:
        """Tokens already cached, in whole blocks, never the whole prompt; then caches the prompt."""
        if not self.settings["enable_prefix_caching"]:
            return 0
        digest = hashlib.sha256((salt or "").encode())
        cached, missing = 0, False
        for end in range(BLOCK, len(words) + 1, BLOCK):
            digest.update("\0".join(words[end - BLOCK : end]).encode())
            key = digest.hexdigest()
            if key in self.prefixes and not missing and end < len(words):
                cached = end
            else:
                missing = True
            self.prefixes.add(key)
        self.counters["queries"] += len(words)
        self.counters["hits"] += cached
        return cached
