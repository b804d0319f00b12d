"""Upstreams: their pooled connections, health, and how fast their first byte has been of late."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from firsttoken.gateway.config import GatewayConfig, UpstreamConfig
from firsttoken.gateway.upstream_http import UpstreamError, UpstreamHttp
from firsttoken.gateway.usage import Api

log = logging.getLogger("firsttoken.gateway")

SMOOTHING = 0.2
"""Weight of the newest sample in the running mean of service times."""
FAILURES_TO_DOWN = 2
HEALTH_TIMEOUT_S = 5.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class Upstream:
    """One server. Created on the event loop that uses it."""

    def __init__(self, config: UpstreamConfig, connect_s: float):
        self.config = config
        self.name = config.name
        self.weight = config.weight
        self.models: frozenset[str] = frozenset(config.models)
        self.healthy = True
        self.failures = 0
        self.in_flight = 0
        """Requests that run there now, through this process."""
        self.waiting = 0
        """Those of them that have had no first token yet."""
        self.service_s: float | None = None
        """Running mean of TTFT divided by the requests that waited ahead; None: not measured yet."""
        self.key = config.api_key()
        self.http = UpstreamHttp(config.root, connect_s, config.keepalive_seconds, config.ca_file)
        own = "Content-Type: application/json\r\nAccept-Encoding: identity\r\n"
        if self.key:
            own += f"Authorization: Bearer {self.key}\r\n"
        self._lines = own
        self._anthropic_lines = own + (f"x-api-key: {self.key}\r\n" if self.key else "")

    def header_lines(self, api: Api) -> str:
        """The header lines that every request to it has."""
        return self._anthropic_lines if api == "messages" else self._lines

    def close(self) -> None:
        self.http.close()

    # ---------------------------------------------------------------- what the router goes by

    def expected_ttft(self, uncached: float = 1.0) -> float:
        """Seconds to the first token of one more request, of whose prompt the share `uncached` must be
        computed.
        """
        return (self.service_s or 0.0) * (self.waiting + uncached) / self.weight

    def observe(self, ttft_s: float, ahead: int) -> None:
        """Learns from a first token that came after `ttft_s`, with `ahead` requests waiting when it was
        sent.
        """
        sample = ttft_s / (ahead + 1) * self.weight
        self.service_s = (
            sample if self.service_s is None else self.service_s + SMOOTHING * (sample - self.service_s)
        )

    def failed(self, why: str) -> None:
        """A connection failed: one more failure in a row, and the upstream is out until a check succeeds."""
        self.failures += 1
        if self.failures >= FAILURES_TO_DOWN and self.healthy:
            self.healthy = False
            log.warning("upstream %s is down: %s", self.name, why)

    def succeeded(self) -> None:
        self.failures = 0
        if not self.healthy:
            self.healthy = True
            log.warning("upstream %s is up again", self.name)

    # ---------------------------------------------------------------- health

    async def check(self) -> bool:
        """One health check; asks for the models too where the configuration names none. True if those
        changed.
        """
        # Services that have no /health answer 404: somebody is there.
        path, worst = ("/health", 499) if self.config.models else ("/v1/models", 200)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                status, body = await self.http.get(path, self._lines, HEALTH_TIMEOUT_S)
            good = status <= worst
            models = self.models
            if good and not self.config.models:
                models = frozenset(m.id for m in msgspec.json.decode(body, type=_Models).data)
        except (UpstreamError, TimeoutError, msgspec.DecodeError) as error:
            self.failed(str(error))
            return False
        if good:
            self.succeeded()
        else:
            self.failed(f"status {status} at {path}")
        changed, self.models = models != self.models, models
        return changed


class Pool:
    """All upstreams, their periodic checks, and their replacement on reload."""

    def __init__(self, on_change: Callable[[], None]):
        self.upstreams: dict[str, Upstream] = {}
        self.on_change = on_change
        self.task: asyncio.Task[None] | None = None
        self.closing: set[asyncio.Task[None]] = set()
        self.interval = 5.0

    async def start(self, configs: tuple[UpstreamConfig, ...], settings: GatewayConfig) -> None:
        self.replace(configs, settings)
        await self._check_all()
        self.task = asyncio.create_task(self._check_forever())

    def replace(self, configs: tuple[UpstreamConfig, ...], settings: GatewayConfig) -> None:
        """Takes the new list: unchanged upstreams stay, removed ones end when their last request has."""
        self.interval = settings.health_interval
        old, self.upstreams = self.upstreams, {}
        for config in configs:
            known = old.get(config.name)
            if known is not None and known.config == config and known.key == config.api_key():
                self.upstreams[config.name] = old.pop(config.name)
            else:
                self.upstreams[config.name] = Upstream(config, settings.connect)
        for upstream in old.values():
            task = asyncio.create_task(_close_when_idle(upstream))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)
        self.on_change()

    async def stop(self) -> None:
        tasks = [*self.closing, *([self.task] if self.task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in self.upstreams.values():
            upstream.close()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self._check_all()

    async def _check_all(self) -> None:
        changed = await asyncio.gather(*(upstream.check() for upstream in self.upstreams.values()))
        if any(changed):
            self.on_change()


async def _close_when_idle(upstream: Upstream) -> None:
    try:
        # `in_flight` falls a moment before the last byte is passed on: wait for it to stay at zero.
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 1.0:
            if upstream.in_flight:
                quiet_since = time.monotonic()
            await asyncio.sleep(0.1)
    finally:
        upstream.close()
