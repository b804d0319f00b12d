"""A benchmark's hands on a firsttoken server in dev mode: its settings, its caches, its counters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from firsttoken.bench.client import Client, Refused
from firsttoken.bench.stamped_http import clock
from firsttoken.engine.config import ConfigError

COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
    "generated": ("vllm:generation_tokens_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
    "cpu_seconds": ("firsttoken:engine_cpu_seconds_total", "firsttoken_engine_cpu_seconds_total"),
}
"""Our name → the names under which servers export it (vLLM's names first; the first that is there counts)."""


@dataclass(slots=True)
class Controls:
    """Dev-mode routes of one server."""

    client: Client
    settings: dict[str, Any] = field(default_factory=dict)
    """The engine's effective settings, as of the last call here that asked."""

    async def check(self) -> None:
        """Raises ConfigError if the server has no dev-mode routes."""
        try:
            self._keep(await self.client.get_json("/settings"))
        except Refused as error:
            raise ConfigError(
                f"{self.client.http.base_url} cannot be reconfigured ({error}): the stages switch caching,"
                " batching and speculation, so start it with `firsttoken serve … --dev-mode`, or leave --url"
                " out and the benchmark starts its own server. `firsttoken probe` measures any server"
            ) from None

    async def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Changes run-time settings; returns all in effect. Raises Refused with the server's words."""
        self._keep(await self._when_idle("/reconfigure", changes))
        return self.settings

    async def reset_prefix_cache(self) -> None:
        await self._when_idle("/reset_prefix_cache")

    async def _when_idle(self, path: str, data: Any = None, patience: float = 5.0) -> Any:
        """Posts, again and again for `patience` seconds while the server says that requests run: the step that
        ends the last one may still be under way."""
        limit = clock() + patience
        while True:
            try:
                return await self.client.post_json(path, data)
            except Refused as error:
                if error.status != 409 or clock() > limit:
                    raise
            await asyncio.sleep(0.02)

    async def speculation(self) -> dict[str, Any]:
        """What the server says of speculation: whether it is on, γ, and the reason."""
        answer = await self.client.get_json("/settings")
        self._keep(answer)
        found = answer.get("speculation") if isinstance(answer, dict) else None
        return found if isinstance(found, dict) else {}

    async def counters(self) -> dict[str, float]:
        """The server's counters now, by our names; those it does not export are absent."""
        return read_counters(await self.client.get_text("/metrics"))

    def _keep(self, answer: Any) -> None:
        if isinstance(answer, dict):
            inner = answer.get("settings", answer)
            self.settings = inner if isinstance(inner, dict) else {}


def read_counters(text: str) -> dict[str, float]:
    """Sums each known counter over its labels."""
    totals: dict[str, float] = {}
    for name, value in prometheus_samples(text):
        totals[name] = totals.get(name, 0.0) + value
    found = {}
    for ours, theirs in COUNTERS.items():
        for name in theirs:
            if name in totals:
                found[ours] = totals[name]
                break
    return found


def prometheus_samples(text: str) -> Iterator[tuple[str, float]]:
    """(name, value) of each sample line of a Prometheus text page."""
    for line in text.splitlines():
        match = re.match(r"([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", line)
        if match:
            yield match[1], float(match[2])


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter gained; one that shrank (the server restarted) is left out."""
    return {k: after[k] - before[k] for k in after if k in before and after[k] >= before[k]}
