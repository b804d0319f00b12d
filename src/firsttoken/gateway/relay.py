"""One request's way through the gateway: read, admit, journal, forward, pass on chunk by chunk, settle.

A plain ASGI application calls `Relay.relay`; nothing stands between it and the socket. Whatever happens (the
client leaves, the upstream dies, the gateway stops), `Exchange.finish` runs exactly once and settles what was
reserved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp

from firsttoken.gateway.accounts import Key
from firsttoken.gateway.clerk import Clerk
from firsttoken.gateway.config import GatewayConfig
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.journal import Record
from firsttoken.gateway.limits import Permit, Refused, Unavailable
from firsttoken.gateway.metrics import Metrics
from firsttoken.gateway.routing import Candidate, Route, Router
from firsttoken.gateway.tracing import Tracer
from firsttoken.gateway.usage import Api, Call, Meter, server_timing

log = logging.getLogger("firsttoken.gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

PASSED_ON = (
    b"accept",
    b"user-agent",
    b"traceparent",
    b"tracestate",
    b"anthropic-version",
    b"anthropic-beta",
    b"openai-beta",
)
"""Request headers that upstreams get to see. Credentials and cookies are not among them."""
RETRY_STATUS = (429, 502, 503, 504)
STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MAX_READ_BODY = 16 << 20
"""Answers that are not streams are kept up to this size to read their usage at the end."""
END_S = 2.0
MAX_ERROR_BODY = 4096
PING = b": ping\n\n"

RETRYABLE = (aiohttp.ClientConnectionError, ConnectionError)
"""The upstream can't be reached, or it closed the connection before it answered."""


class Relay:
    """What all requests share."""

    def __init__(
        self, settings: GatewayConfig, clerk: Clerk, router: Router, metrics: Metrics, tracer: Tracer | None
    ):
        self.settings = settings
        self.clerk, self.router, self.metrics, self.tracer = clerk, router, metrics, tracer
        self.exchanges: set[Exchange] = set()

    async def relay(
        self, scope: Scope, receive: Receive, send: Send, api: Api, key: Key, arrived: float
    ) -> None:
        """Serves one request; raises ApiError for what ends before anything was sent."""
        if len(self.exchanges) >= self.settings.max_streams:
            raise ApiError(
                503, "The gateway is at its limit of streams; retry shortly.", "overloaded", retry_after=1
            )
        body = await read_body(receive, self.settings.max_body_mib << 20, self.settings.request_read)
        if body is None:
            return
        call = Call(api, body)
        route = self.router.route(call.model, key, call.prompt)
        exchange = Exchange(self, scope, send, call, route, key, arrived)
        await exchange.run(receive)

    def end_limited(self) -> None:
        """After a lost lease: requests that hold concurrency permits end, as others may hold the same
        permits.
        """
        for exchange in list(self.exchanges):
            if exchange.key.max_concurrency is not None:
                exchange.end("The gateway lost its lease on this key's limits.")

    async def end_all(self) -> None:
        """At the end of the drain time: what still runs is ended and settled."""
        tasks = [exchange.task for exchange in self.exchanges if exchange.task is not None]
        for exchange in list(self.exchanges):
            exchange.end("the gateway stopped")
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)


class Exchange:
    """One request and its answer."""

    def __init__(
        self, relay: Relay, scope: Scope, send: Send, call: Call, route: Route, key: Key, arrived: float
    ):
        self.relay, self.scope, self.send = relay, scope, send
        self.call, self.route, self.key = call, route, key
        self.arrived = arrived  # time.perf_counter() when the request's head was read
        self.meter = Meter(call.api)
        self.candidate = route.candidates[0]
        self.permit: Permit | None = None
        self.response: aiohttp.ClientResponse | None = None
        self.started = False  # the answer's head was sent
        self.client_left = False
        self.sending = False  # waiting for the client to read
        self.ended_because: str | None = None
        self.task: asyncio.Task[Any] | None = None
        self.waiting_at: Candidate | None = None
        self.ahead = 0
        self.forwarded = 0.0
        client_id = (header(scope, b"x-request-id") or b"")[:128].decode("latin-1")
        self.record = Record(
            id=new_id(),
            client_id=client_id if client_id and client_id.isprintable() else None,
            process_id=relay.clerk.process_id,
            key_id=key.id,
            load_test=key.load_test,
            endpoint=call.api,
            alias=route.alias,
            model=self.candidate.model,
            upstream=self.candidate.upstream.name,
            stream=call.stream,
            started_at=relay.clerk.clock(),
        )

    # ---------------------------------------------------------------- the whole

    async def run(self, receive: Receive) -> None:
        self.task = asyncio.current_task()
        assert self.task is not None
        self.relay.exchanges.add(self)
        self.relay.metrics.numbers.in_flight += 1
        watcher: asyncio.Task[None] | None = None
        try:
            await self._admit()
            self._journal_start()
            watcher = asyncio.create_task(self._watch(receive))
            await self._serve()
        except asyncio.CancelledError:
            # By _watch (the client left), by end(), or by the server's shutdown. Nobody above waits to hear
            # of it.
            self.task.uncancel()
            reason = self.ended_because or "the gateway stopped"
            self.finish("aborted", None if self.client_left else reason)
            await self._fail(ApiError(503, f"The request was ended: {reason}.", "gateway_ended_request"))
        except ApiError as error:
            limited = error.status == 429 and self.permit is None
            self.finish("limited" if limited else "error", error.message, error.status)
            await self._fail(error)
        finally:
            if watcher is not None:
                watcher.cancel()
            self.finish("error", "internal error", 500)
            self.relay.exchanges.discard(self)
            self.relay.metrics.numbers.in_flight -= 1

    async def _admit(self) -> None:
        clerk = self.relay.clerk
        tokens = self.call.reserve(self.relay.settings.default_output_tokens)
        try:
            self.permit = await clerk.limiter.admit(self.key, tokens)
        except Refused as refused:
            code = "quota_exceeded" if refused.kind.startswith("quota") else "rate_limit_exceeded"
            raise ApiError(429, str(refused), code, retry_after=refused.retry_after) from None
        except Unavailable:
            message = "The gateway can't reach its store, so it can't keep this key's limits."
            raise ApiError(503, message, "store_unavailable", retry_after=5) from None
        self.record.windows = self.permit.windows

    def _journal_start(self) -> None:
        try:
            self.relay.clerk.record(self.record)
        except OSError as error:
            log.error("the journal: %s", error)
            raise ApiError(503, "The gateway can't write its journal.", "journal_unavailable") from None

    async def _watch(self, receive: Receive) -> None:
        """Notices the client's departure at once, also while the upstream is silent."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self.record.status == "running":
            self.client_left = True
            self.end("the client left")

    def end(self, reason: str) -> None:
        """Cancels the request, and with it its upstream's."""
        if self.record.status == "running" and self.task is not None:
            self.ended_because = reason
            self.task.cancel()

    async def _serve(self) -> None:
        settings = self.relay.settings
        if self.call.stream and settings.ping is not None:
            response = await self._ping_until(asyncio.ensure_future(self._open()), settings.ping)
        else:
            response = await self._open()
        self.response = response
        try:
            if response.status == 200 and response.content_type == "text/event-stream":
                await self._pass_stream(response)
            elif self.started:
                await self._fail_after_pings(response)
            else:
                await self._pass_body(response)
        except (aiohttp.ClientError, ConnectionError) as error:
            self.candidate.upstream.failed()
            raise ApiError(
                502, f"The upstream ended the answer early ({type(error).__name__}).", "upstream_died"
            ) from None
        except TimeoutError:
            if self.sending:
                self.client_left = True
                self.finish("aborted", f"the client read nothing for {settings.idle:g} s")
                raise ApiError(408, "The client reads nothing.", "client_stalled") from None
            if self.meter.chunks or self.started:
                raise ApiError(
                    504, f"The upstream was silent for {settings.idle:g} s.", "upstream_silent"
                ) from None
            raise ApiError(
                504, f"No first byte within {settings.first_byte:g} s.", "first_byte_timeout"
            ) from None

    # ---------------------------------------------------------------- to the upstream

    async def _open(self) -> aiohttp.ClientResponse:
        """The upstream's answer, its head read: of the best candidate, or of the next while nothing was
        sent.
        """
        settings = self.relay.settings
        candidates = self.route.candidates[: settings.retries + 1]
        failure = ApiError(503, "No upstream.", "no_upstream")
        for candidate in candidates:
            last = candidate is candidates[-1]
            self.candidate = candidate
            self.record.model, self.record.upstream = candidate.model, candidate.upstream.name
            try:
                async with asyncio.timeout(settings.first_byte):
                    response = await self._post(candidate)
            except TimeoutError:
                # It had its time; another try would double the wait and the work.
                raise ApiError(
                    504, f"No answer within {settings.first_byte:g} s.", "first_byte_timeout"
                ) from None
            except (*RETRYABLE, aiohttp.ClientError) as error:
                candidate.upstream.failed()
                failure = ApiError(
                    502, f"The upstream can't be reached ({type(error).__name__}).", "upstream_unreachable"
                )
                self._stop_waiting()
                continue
            if response.status in RETRY_STATUS and not last:
                response.close()
                self._stop_waiting()
                continue
            return response
        raise failure

    async def _post(self, candidate: Candidate) -> aiohttp.ClientResponse:
        upstream = candidate.upstream
        call = self.call
        if upstream.config.priority:
            call.set_priority(self.key.priority)
        if upstream.config.stream_usage:
            call.ask_for_usage()
        body = call.encode(candidate.model)
        path = self.scope["path"].removeprefix(self.relay.settings.root_path)
        self.relay.router.sent(self.route.prefix, upstream)
        self.ahead, self.waiting_at = upstream.waiting, candidate
        upstream.waiting += 1
        upstream.in_flight += 1
        for again in (True, False):
            self.record.attempts += 1
            self.forwarded = time.perf_counter()
            if self.record.gateway_ms is None:
                self.record.gateway_ms = (self.forwarded - self.arrived) * 1e3
            try:
                return await upstream.session.post(
                    upstream.url(path),
                    data=body,
                    headers=self._headers(candidate),
                    allow_redirects=False,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A pooled socket that the upstream closed just now: nobody has seen the request.
                if not again or self.record.id in upstream.connector.opened:
                    raise
            finally:
                upstream.connector.opened.discard(self.record.id)
        raise AssertionError("unreachable")

    def _headers(self, candidate: Candidate) -> dict[str, str]:
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in self.scope["headers"]
            if name in PASSED_ON
        }
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"
        headers["X-Request-Id"] = self.record.id
        upstream = candidate.upstream
        if upstream.authorization:
            headers["Authorization"] = upstream.authorization
            if self.call.api == "messages" and upstream.key:
                headers["x-api-key"] = upstream.key
        if self.relay.tracer is not None:
            headers["traceparent"] = self.relay.tracer.traceparent(self.record.id, headers.get("traceparent"))
        return headers

    def _stop_waiting(self) -> None:
        if self.waiting_at is not None:
            self.waiting_at.upstream.waiting -= 1
            self.waiting_at.upstream.in_flight -= 1
            self.waiting_at = None

    # ---------------------------------------------------------------- to the client

    async def _pass_stream(self, response: aiohttp.ClientResponse) -> None:
        settings, meter, record = self.relay.settings, self.meter, self.record
        read = response.content.readany
        hide_usage = self.call.hide_usage
        loop = asyncio.get_running_loop()
        deadline = settings.first_byte
        async with asyncio.timeout(None) as silence:
            while True:
                silence.reschedule(loop.time() + deadline)
                if meter.first_token or settings.ping is None:
                    data = await read()
                else:
                    data = await self._ping_until(asyncio.ensure_future(read()), settings.ping)
                if not data:
                    break
                deadline = settings.idle
                now = time.perf_counter()
                had_token = meter.first_token
                data = meter.feed(data, hide_usage)
                if meter.first_token and not had_token:
                    self._first_token(now)
                if data:
                    self.sending = True
                    if not self.started:
                        await self._start(response)
                    await self.send({"type": "http.response.body", "body": data, "more_body": True})
                    self.sending = False
        if not meter.done and "Transfer-Encoding" not in response.headers:
            # Without chunked encoding a cut connection looks like an end; with it aiohttp has raised.
            raise ApiError(502, "The upstream ended the stream early.", "upstream_died")
        self.candidate.upstream.succeeded()
        record.http_status = 200
        self.finish("error" if meter.error else "ok", meter.error)
        if not self.started:
            await self._start(response)
        await self.send({"type": "http.response.body", "body": meter.tail, "more_body": False})

    async def _pass_body(self, response: aiohttp.ClientResponse) -> None:
        settings = self.relay.settings
        kept: bytearray | None = bytearray()
        length = response.headers.get("Content-Length")
        deadline = settings.first_byte
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as silence:
            while True:
                silence.reschedule(loop.time() + deadline)
                data = await response.content.readany()
                if not data:
                    break
                deadline = settings.idle
                if kept is not None:
                    kept += data
                    if len(kept) > MAX_READ_BODY:
                        await self._start(response, length)
                        await self.send(
                            {"type": "http.response.body", "body": bytes(kept), "more_body": True}
                        )
                        kept = None
                else:
                    await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.record.http_status = response.status
        if response.status >= 400:
            self.finish("error", f"upstream status {response.status}")
        else:
            if kept is not None:
                self.meter.read_body(bytes(kept))
            self.candidate.upstream.succeeded()
            self.finish("ok")
        if kept is None:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._start(response, str(len(kept)))
            await self.send({"type": "http.response.body", "body": bytes(kept), "more_body": False})

    async def _fail_after_pings(self, response: aiohttp.ClientResponse) -> None:
        """The stream was opened for pings, and then the upstream sent something else, most likely an error."""
        async with asyncio.timeout(self.relay.settings.idle):
            body = await response.content.read(MAX_ERROR_BODY)
        said = storable(body.decode("utf-8", "replace"))
        raise ApiError(response.status, f"The upstream answered {response.status}: {said}", "upstream_error")

    def _first_token(self, now: float) -> None:
        self.record.ttft_ms = (now - self.arrived) * 1e3
        self.candidate.upstream.observe(now - self.forwarded, self.ahead)
        if self.waiting_at is not None:
            self.waiting_at.upstream.waiting -= 1

    async def _start(self, response: aiohttp.ClientResponse, length: str | None = None) -> None:
        """Sends the answer's head: the upstream's type and timing, and what is ours."""
        headers = self._own_headers()
        own = f"gateway;dur={self.record.gateway_ms:.3f}"
        timing = response.headers.get("Server-Timing")
        if timing:
            self.meter.timing = server_timing(timing) | self.meter.timing
            own = f"{own}, {timing}"
        headers.append((b"server-timing", own.encode("latin-1")))
        for name in ("Content-Type", "Content-Encoding", "Retry-After"):
            if (value := response.headers.get(name)) is not None:
                headers.append((name.lower().encode(), value.encode("latin-1")))
        if length is not None:
            headers.append((b"content-length", length.encode()))
        elif response.status == 200:
            headers += STREAM_HEADERS
        self.started = True
        await self.send({"type": "http.response.start", "status": response.status, "headers": headers})

    def _own_headers(self) -> Headers:
        record = self.record
        headers: Headers = [
            (b"x-request-id", (record.client_id or record.id).encode("latin-1")),
            (b"x-gateway-request-id", record.id.encode()),
        ]
        if not self.key.limits:
            return headers
        left = self.relay.clerk.limiter.remaining(self.key)
        for kind, name in (("rpm", b"requests"), ("tpm", b"tokens")):
            if kind in left:
                limit, remaining, reset = left[kind]
                headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
                headers.append((b"x-ratelimit-remaining-" + name, b"%d" % remaining))
                headers.append((b"x-ratelimit-reset-" + name, b"%.3fs" % reset))
        return headers

    async def _ping_until(self, future: asyncio.Future[Any], every: float) -> Any:
        """Waits for `future`; while it takes long, opens the stream and sends comments, so that proxies stay
        calm.
        """
        try:
            while not (await asyncio.wait((future,), timeout=every))[0]:
                if not self.started:
                    self.started = True
                    headers = [
                        *self._own_headers(),
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        *STREAM_HEADERS,
                    ]
                    await self.send({"type": "http.response.start", "status": 200, "headers": headers})
                await self.send({"type": "http.response.body", "body": PING, "more_body": True})
            return future.result()
        finally:
            if not future.done():
                future.cancel()

    async def _fail(self, error: ApiError) -> None:
        """Tells the client: as an answer if none has begun, else as an event of its stream."""
        if self.client_left:
            return
        if not self.started:
            self.started = True
            await send_error(self.send, error, self._own_headers())
            return
        if self.call.stream:
            event = error.event(anthropic=self.call.api == "messages")
            await self.send({"type": "http.response.body", "body": event, "more_body": False})
        # Else a body was cut short: returning without its end makes the server close the connection.

    # ---------------------------------------------------------------- the end

    def finish(self, status: str, error: str | None = None, http_status: int | None = None) -> None:
        """Settles, once: the journal's end record, permits, metrics, and the upstream's connection."""
        record, meter = self.record, self.meter
        if record.status != "running":
            return
        record.status = status
        record.error = storable(error)
        record.http_status = http_status or record.http_status
        if status == "limited":
            record.upstream = ""
        if self.waiting_at is not None:
            if record.ttft_ms is None:
                self.waiting_at.upstream.waiting -= 1
            self.waiting_at.upstream.in_flight -= 1
            self.waiting_at = None
        if self.response is not None and not self.response.content.at_eof():
            self.response.close()  # cancels the request at the upstream
        record.duration_ms = (time.perf_counter() - self.arrived) * 1e3
        record.prompt_tokens, record.cached_tokens = meter.prompt, meter.cached
        record.completion_tokens = meter.completion
        if meter.completion is None and meter.chunks:
            record.completion_tokens = meter.chunks  # what was observed, where the upstream told nothing
        record.drafted_tokens, record.accepted_tokens = meter.drafted, meter.accepted
        record.queue_ms = meter.timing.get("queue")
        record.prefill_ms = meter.timing.get("prefill")
        record.first_decode_ms = meter.timing.get("first_decode")
        if self.permit is not None:
            self.relay.clerk.limiter.settle(self.permit, record.tokens)
        try:
            self.relay.clerk.record(record)
        except OSError as error:
            log.error("the journal: %s; the end of request %s is not accounted for", error, record.id)
        self.relay.metrics.observe(record, self.key.name)
        if self.relay.tracer is not None:
            self.relay.tracer.span(record, header(self.scope, b"traceparent"))


# ---------------------------------------------------------------- helpers


async def read_body(receive: Receive, limit: int, seconds: float) -> bytes | None:
    """The whole request body; None if the client left. ApiError 413 and 408."""
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body: bytes = message.get("body", b"")
            if not message.get("more_body") and len(body) <= limit:
                return body
            parts = [body]
            size = len(body)
            while True:
                if size > limit:
                    raise ApiError(413, f"The request body is larger than {limit} bytes.", "body_too_large")
                if not message.get("more_body"):
                    return b"".join(parts)
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
    except TimeoutError:
        raise ApiError(408, f"The request did not arrive within {seconds:g} s.", "request_timeout") from None


async def send_error(send: Send, error: ApiError, headers: Headers | None = None) -> None:
    body = error.body()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status in (408, 413):
        own.append((b"connection", b"close"))  # the rest of the body is not read
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [*own, *error.headers, *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def storable(text: str | None) -> str | None:
    """An upstream's words, cut, without what a database can't store (NUL, lone surrogates)."""
    return text[:300].replace("\0", "").encode("utf-8", "replace").decode() if text else None


def new_id() -> str:
    """Unique, and in the order of time: 48 bits of milliseconds, 80 random bits."""
    return f"req-{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"
