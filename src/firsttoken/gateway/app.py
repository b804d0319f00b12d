"""The gateway's ASGI application: a table of routes, each behind the one authentication seam.

Plain ASGI, without middleware: whatever stands around a relay costs every chunk.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from firsttoken import __version__
from firsttoken.gateway import admin
from firsttoken.gateway.accounts import Key
from firsttoken.gateway.asgi import Receive, Scope, Send, read_body, send_error
from firsttoken.gateway.auth import bearer
from firsttoken.gateway.clerk import Clerk
from firsttoken.gateway.config import Config, replaced, restart_needed
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.metrics import CONTENT_TYPE, LAG_S, Metrics
from firsttoken.gateway.relay import Relay
from firsttoken.gateway.routing import Router
from firsttoken.gateway.store import Store
from firsttoken.gateway.tracing import Tracer
from firsttoken.gateway.upstreams import Pool
from firsttoken.gateway.usage import ENDPOINTS

log = logging.getLogger("firsttoken.gateway")
T = TypeVar("T")

LAG_INTERVAL_S = 0.1
PUBLISH_S = 2.0
JSON = b"application/json"


class App:
    """One gateway process. `start` and `stop` are called by the server that runs it (see `serve.py`)."""

    def __init__(self, config: Config, store: Store):
        self.config = config
        self.store = store
        settings = config.gateway
        day = 86_400.0
        self.clerk = Clerk(
            store,
            config.state_dir / "journal",
            settings.retain_requests_days * day,
            settings.retain_minutes_days * day,
        )
        self.clerk.on_settings = self._reroute
        self.router = Router()
        self.pool = Pool(on_change=self._reroute)
        folder = config.state_dir / "metrics" if settings.workers > 1 else None
        self.metrics = Metrics(folder, f"{socket.gethostname()}-{os.getpid()}")
        self.tracer = Tracer() if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") else None
        self.relay = Relay(settings, self.clerk, self.router, self.metrics, self.tracer)
        self.clerk.on_lease_lost = self.relay.end_limited
        self.admin = admin.Admin(store, self.live)
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="admin")
        self.tasks: list[asyncio.Task[None]] = []
        self.metrics_token = os.environ.get(settings.metrics_token_env or "") or None

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        await self.clerk.start()
        await self.pool.start(self.config.upstreams, self.config.gateway)
        self.tasks = [asyncio.create_task(self._measure_lag()), asyncio.create_task(self._publish())]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.pool.stop()
        await self.clerk.stop()
        self.threads.shutdown()
        if self.tracer is not None:
            self.tracer.close()

    def reload(self, config: Config) -> None:
        """Takes a new configuration; running streams keep what they have."""
        if needed := restart_needed(self.config.gateway, config.gateway):
            log.warning("reload: %s change at the next start only", ", ".join(needed))
            config = Config(
                gateway=replaced(self.config.gateway, config.gateway),
                upstreams=config.upstreams,
                aliases=config.aliases,
            )
        self.config = config
        self.relay.settings = config.gateway
        self.pool.replace(config.upstreams, config.gateway)
        log.warning("reloaded: %d upstreams, %d aliases", len(config.upstreams), len(config.aliases))

    def _reroute(self) -> None:
        self.router.update(
            self.pool.upstreams,
            self.config.aliases,
            self.clerk.keys.aliases,
            self.config.gateway.default_model,
        )

    # ---------------------------------------------------------------- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        try:
            if scope["type"] != "http":
                raise ApiError(404, "Only HTTP is served here.", "not_found")
            await self._route(scope, receive, send, arrived)
        except ApiError as error:
            await send_error(send, error)

    async def _route(self, scope: Scope, receive: Receive, send: Send, arrived: float) -> None:
        path: str = scope["path"].removeprefix(self.config.gateway.root_path)
        method: str = scope["method"]
        api = ENDPOINTS.get(path)
        if api is not None:
            if method != "POST":
                raise ApiError(405, f"{path} takes POST.", "method_not_allowed")
            key = await self._authenticate(scope)
            await self.relay.relay(scope, receive, send, api, key, arrived)
        elif path == "/health":
            await _answer(send, 200, b'{"status":"ok"}')
        elif path == "/version":
            await _json(send, {"version": __version__})
        elif path == "/metrics":
            await self._metrics(scope, send)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            await self._models(send, await self._authenticate(scope), path[len("/v1/models/") :])
        elif path == "/v1/usage":
            key = await self._authenticate(scope)
            await _json(send, await self._in_thread(admin.own_usage, self.store, key, scope["query_string"]))
        elif path.startswith("/admin/v1/"):
            await self._admin(scope, receive, send, path[len("/admin/v1/") :])
        else:
            raise ApiError(404, f"There is no {path} here.", "not_found")

    async def _authenticate(self, scope: Scope, admin: bool = False) -> Key:
        return await self.clerk.keys.authenticate(scope["headers"], self.clerk.clock(), admin)

    async def _models(self, send: Send, key: Key, name: str) -> None:
        models = [
            {"id": id, "object": "model", "created": 0, "owned_by": "firsttoken"}
            for id in self.router.names(key)
        ]
        if not name:
            await _json(send, {"object": "list", "data": models})
            return
        for model in models:
            if model["id"] == name:
                await _json(send, model)
                return
        raise ApiError(
            404, f"The model {name!r} does not exist, or this key may not use it.", "model_not_found", "model"
        )

    async def _admin(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        actor = await self._authenticate(scope, admin=True)
        body = await read_body(receive, 1 << 20, self.config.gateway.request_read)
        if body is None:
            return
        handle = self.admin.handle
        status, answer = await self._in_thread(
            handle, scope["method"], path, scope["query_string"], body, actor
        )
        if scope["method"] != "GET" and await self.clerk.keys.refresh():
            self._reroute()  # this process at once, the others within half a second
        if isinstance(answer, admin.Text):
            await _answer(send, status, answer.encode(), b"text/csv; charset=utf-8")
        else:
            await _json(send, answer, status)

    async def _metrics(self, scope: Scope, send: Send) -> None:
        token = bearer(scope["headers"]) or ""
        if self.metrics_token is None or not hmac.compare_digest(token.encode(), self.metrics_token.encode()):
            await self._authenticate(scope, admin=True)
        await _answer(send, 200, await self.render_metrics(), CONTENT_TYPE)

    async def render_metrics(self) -> bytes:
        return await self._in_thread(self.metrics.render, self._snapshot())

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *args)

    # ---------------------------------------------------------------- what the process knows of itself

    def live(self) -> dict[str, Any]:
        """Models, aliases and upstreams as this process sees them now."""
        upstreams = [
            {
                "name": upstream.name,
                "base_url": upstream.config.root,
                "healthy": upstream.healthy,
                "models": sorted(upstream.models),
                "weight": upstream.weight,
                "in_flight": upstream.in_flight,
                "waiting": upstream.waiting,
                "expected_ttft_ms": None if upstream.service_s is None else upstream.expected_ttft() * 1e3,
            }
            for upstream in self.pool.upstreams.values()
        ]
        aliases = [
            {
                "name": name,
                "target": alias.model,
                "fallbacks": alias.fallbacks,
                "switched": name in self.clerk.keys.aliases,
            }
            for name, alias in sorted(self.router.aliases.items())
        ]
        models = [
            {"name": name, "upstreams": [up.name for up in ups]}
            for name, ups in sorted(self.router.by_model.items())
        ]
        return {
            "models": models,
            "aliases": aliases,
            "upstreams": upstreams,
            "default_model": self.router.default_model,
            "processes": self.clerk.alive,
        }

    def _snapshot(self) -> bytes:
        numbers = self.metrics.numbers
        numbers.upstreams = {
            upstream.name: [float(upstream.healthy), float(upstream.in_flight), upstream.expected_ttft()]
            for upstream in self.pool.upstreams.values()
        }
        return self.metrics.encode()

    async def _publish(self) -> None:
        while self.metrics.path is not None:
            await self._in_thread(self.metrics.publish, self._snapshot())
            await asyncio.sleep(PUBLISH_S)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.metrics.numbers.lag.observe(LAG_S, max(0.0, loop.time() - due))


async def _json(send: Send, value: Any, status: int = 200) -> None:
    await _answer(send, status, msgspec.json.encode(value))


async def _answer(send: Send, status: int, body: bytes, content_type: bytes = JSON) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
