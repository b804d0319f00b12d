"""Upstreams: their pooled connections, health, and how fast their first byte has been of late."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from firsttoken.gateway.config import GatewayConfig, UpstreamConfig

log = logging.getLogger("firsttoken.gateway")

SMOOTHING = 0.2
"""Weight of the newest sample in the running mean of service times."""
FAILURES_TO_DOWN = 2
HEALTH_TIMEOUT_S = 5.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class Connector(aiohttp.TCPConnector):
    """Knows which requests had a socket opened for them (aiohttp's tracing says it too, for 0.1 ms a request)."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.opened: set[str] = set()
        """X-Request-Id of requests that did not get a pooled socket; taken out when their attempt has ended."""

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109 (aiohttp's)
        self.opened.add(req.headers.get("X-Request-Id", ""))
        return await super()._create_connection(req, traces, timeout)


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
        key = config.api_key()
        self.authorization = f"Bearer {key}" if key else None
        self.key = key
        self.urls: dict[str, URL] = {}
        self.session = self._session(connect_s)

    def _session(self, connect_s: float) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = True
        if self.config.ca_file:
            context = ssl.create_default_context()
            context.load_verify_locations(self.config.ca_file)
        # Streams are limited by max_streams, not by waiting for a socket.
        self.connector = Connector(limit=0, keepalive_timeout=self.config.keepalive_seconds, ssl=context)
        return aiohttp.ClientSession(
            connector=self.connector,
            # No limit on the whole: an answer may take an hour. The relay watches first byte and silence.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=256 << 10,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    def url(self, path: str) -> URL:
        """Parsed once per path; paths are those of `usage.ENDPOINTS`."""
        found = self.urls.get(path)
        if found is None:
            found = self.urls[path] = URL(self.config.root + path)
        return found

    async def close(self) -> None:
        await self.session.close()

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

    def failed(self) -> None:
        """A connection failed: one more failure in a row, and the upstream is out until a check succeeds."""
        self.failures += 1
        if self.failures >= FAILURES_TO_DOWN and self.healthy:
            self.healthy = False
            log.warning("upstream %s is down", self.name)

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
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                if self.config.models:
                    # Services that have no /health answer 404: somebody is there.
                    async with self.session.get(
                        f"{self.config.root}/health", headers=self._headers()
                    ) as answer:
                        good = answer.status < 500
                    models = self.models
                else:
                    async with self.session.get(
                        f"{self.config.root}/v1/models", headers=self._headers()
                    ) as answer:
                        good = answer.status == 200
                        body = await answer.read()
                    models = self.models
                    if good:
                        models = frozenset(m.id for m in msgspec.json.decode(body, type=_Models).data)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            self.failed()
            return False
        if good:
            self.succeeded()
        else:
            self.failed()
        changed, self.models = models != self.models, models
        return changed

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self.authorization} if self.authorization else {}


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
            await upstream.close()

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
        await upstream.close()
