"""Which upstream gets a request: the least expected TTFT, where a prompt's prefix is cached counting as a saving.

Expected TTFT of an upstream = its measured service time · (requests waiting there + the share of this prompt that
it would have to compute). The share comes from a table of the prompt prefixes that were sent to each upstream
lately, in blocks of BLOCK bytes chained by hash, as engines cache them. So a conversation returns to where its
cache is warm, until others queue there: then the wait outweighs the saving and it moves. A prefix that nobody
knows has a home by rendezvous hashing, slightly preferred, so that several gateway processes agree on it.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import OrderedDict
from dataclasses import dataclass

from firsttoken.gateway.accounts import Key
from firsttoken.gateway.config import AliasConfig
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.upstreams import Upstream

BLOCK = 512
MAX_BLOCKS = 64
TABLE_SIZE = 100_000
HOME_BONUS = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """An upstream, and what the model is called there."""

    upstream: Upstream
    model: str


@dataclass(frozen=True, slots=True)
class Route:
    alias: str
    """The name that the client used (or the default model's)."""
    candidates: list[Candidate]
    """The best first, then what to try before the first byte if it fails."""
    prefix: list[int]


class Router:
    def __init__(self) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self.aliases: dict[str, AliasConfig] = {}
        self.default_model: str | None = None
        self.by_model: dict[str, list[Upstream]] = {}
        self.prefixes: OrderedDict[int, str] = OrderedDict()
        """Hash of a prompt prefix → the upstream that computed it last."""

    def update(
        self,
        upstreams: dict[str, Upstream],
        aliases: dict[str, AliasConfig],
        switched: dict[str, str],
        default_model: str | None,
    ) -> None:
        """Takes new upstreams, the file's aliases, and those switched at run time, which win."""
        self.upstreams, self.default_model = upstreams, default_model
        self.aliases = dict(aliases)
        for name, model in switched.items():
            old = aliases.get(name)
            self.aliases[name] = AliasConfig(model=model, fallbacks=old.fallbacks if old else [])
        self.by_model = {}
        for upstream in upstreams.values():
            for model in upstream.models:
                self.by_model.setdefault(model, []).append(upstream)

    def names(self, key: Key) -> list[str]:
        """Names of models and aliases that the key may use and that have an upstream."""
        names = set(self.by_model) | {
            name for name, alias in self.aliases.items() if alias.model in self.by_model
        }
        return sorted(name for name in names if key.allows(name))

    def route(self, name: str | None, key: Key, prompt: bytes) -> Route:
        """Raises ApiError: 404 for a model that isn't there or not for this key, 503 if all its upstreams
        are down.
        """
        name = name or self.default_model
        if not name:
            raise ApiError(400, "model: name a model; GET /v1/models lists them.", "missing_model", "model")
        alias = self.aliases.get(name)
        models = [alias.model, *alias.fallbacks] if alias else [name]
        if not key.allows(name) or not any(model in self.by_model for model in models):
            raise ApiError(
                404,
                f"The model {name!r} does not exist, or this key may not use it.",
                "model_not_found",
                "model",
            )
        pinned = key.plan.upstream if key.plan else None
        choices = [
            [up for up in self.by_model.get(model, ()) if pinned in (None, up.name)] for model in models
        ]
        prefix = chain(prompt) if any(len(ups) > 1 for ups in choices) else []
        candidates = [
            Candidate(upstream, model)
            for model, ups in zip(models, choices, strict=True)
            for upstream in self._in_order([up for up in ups if up.healthy], prefix)
        ]
        if not candidates:
            # All are down as far as we know: one is tried all the same, for it may just have come back.
            candidates = [
                Candidate(up, model) for model, ups in zip(models, choices, strict=True) for up in ups
            ]
        if not candidates:
            raise ApiError(503, f"No upstream for {name!r} that this key's plan allows.", "no_upstream")
        return Route(name, candidates, prefix)

    def _in_order(self, upstreams: list[Upstream], prefix: list[int]) -> list[Upstream]:
        if len(upstreams) < 2:
            return upstreams
        home = max(upstreams, key=lambda up: _rendezvous(prefix[0], up)) if prefix else None
        known = self.known_share(prefix)
        # An upstream without measurements is tried before those with: it must be measured.
        return sorted(
            upstreams,
            key=lambda up: (
                up.service_s is not None,
                up.expected_ttft(1.0 - known.get(up.name, 0.0)) * (1.0 - HOME_BONUS * (up is home)),
                up.in_flight / up.weight,
                up is not home,
            ),
        )

    def known_share(self, prefix: list[int]) -> dict[str, float]:
        """Upstream → share of the prompt's blocks that it has computed lately."""
        shares: dict[str, float] = {}
        for i, block in enumerate(prefix, 1):
            name = self.prefixes.get(block)
            if name is None:
                break
            shares[name] = i / len(prefix)
        return shares

    def sent(self, prefix: list[int], upstream: Upstream) -> None:
        """Remembers that `upstream` computes this prompt now."""
        table = self.prefixes
        for block in prefix:
            table[block] = upstream.name
            table.move_to_end(block)
        while len(table) > TABLE_SIZE:
            table.popitem(last=False)


def chain(prompt: bytes) -> list[int]:
    """A hash per block of the prompt, each over the previous block's hash and the block."""
    hashes, last = [], 0
    for start in range(0, min(len(prompt), BLOCK * MAX_BLOCKS), BLOCK):
        last = hash((last, prompt[start : start + BLOCK])) if start else zlib.crc32(prompt[:BLOCK])
        hashes.append(last)
    return hashes


def _rendezvous(block: int, upstream: Upstream) -> float:
    """Weighted rendezvous hashing: the highest score is the home; the same in every process."""
    digest = hashlib.blake2b(f"{block}:{upstream.name}".encode(), digest_size=8).digest()
    return upstream.weight / -math.log((int.from_bytes(digest) + 0.5) / 2**64)
