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
from typing import Any

from firsttoken.gateway.accounts import Key
from firsttoken.gateway.asgi import Receive, Scope, Send, header, read_body
from firsttoken.gateway.clerk import Clerk
from firsttoken.gateway.config import GatewayConfig
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.forwarding import Forwarding
from firsttoken.gateway.journal import Record
from firsttoken.gateway.limits import Permit, Refused, Unavailable
from firsttoken.gateway.metrics import Metrics
from firsttoken.gateway.reply import Reply
from firsttoken.gateway.routing import Route, Router
from firsttoken.gateway.tracing import Tracer
from firsttoken.gateway.upstream_http import Answer, Silent, UpstreamError
from firsttoken.gateway.usage import Api, Call, Meter, server_timing

log = logging.getLogger("firsttoken.gateway")

MAX_READ_BODY = 16 << 20
"""Answers that are not streams are kept up to this size to read their usage at the end."""
END_S = 2.0
MAX_ERROR_BODY = 4096


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
        self.relay, self.scope = relay, scope
        self.call, self.key = call, key
        self.arrived = arrived  # time.perf_counter() when the request's head was read
        self.meter = Meter(call.api)
        self.permit: Permit | None = None
        self.client_left = False
        self.ended_because: str | None = None
        self.task: asyncio.Task[Any] | None = None
        self.watcher: asyncio.Task[None] | None = None
        client_id = (header(scope, b"x-request-id") or b"")[:128].decode("latin-1")
        first = route.candidates[0]
        self.record = Record(
            id=new_id(),
            client_id=client_id if client_id and client_id.isprintable() else None,
            process_id=relay.clerk.process_id,
            key_id=key.id,
            load_test=key.load_test,
            endpoint=call.api,
            alias=route.alias,
            model=first.model,
            upstream=first.upstream.name,
            stream=call.stream,
            started_at=relay.clerk.clock(),
        )
        self.forwarding = Forwarding(call, route, key, self.record, arrived)
        self.reply = Reply(send, self.record, key, relay.clerk.limiter)

    # ---------------------------------------------------------------- the whole

    async def run(self, receive: Receive) -> None:
        self.task = asyncio.current_task()
        assert self.task is not None
        self.relay.exchanges.add(self)
        self.relay.metrics.numbers.in_flight += 1
        try:
            await self._admit()
            self._journal_start()
            # Runs when the request has been written and this task waits: nothing of it delays the request.
            asyncio.get_running_loop().call_soon(self._meanwhile, receive)
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
            if self.watcher is not None:
                self.watcher.cancel()
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

    def _meanwhile(self, receive: Receive) -> None:
        """What can be done while the upstream works is done then."""
        if self.record.status == "running":
            self.watcher = asyncio.create_task(self._watch(receive))
            self.reply.prepare()

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

    async def _fail(self, error: ApiError) -> None:
        if not self.client_left:
            await self.reply.fail(error, self.call.stream, anthropic=self.call.api == "messages")

    async def _serve(self) -> None:
        """From the forwarded request to the last byte of its answer. ApiError for whatever goes wrong."""
        relay, settings = self.relay, self.relay.settings
        opening = self.forwarding.open(settings, relay.router, relay.tracer, self.scope)
        if self.call.stream and settings.ping is not None:
            answer = await self.reply.ping_until(asyncio.ensure_future(opening), settings.ping)
        else:
            answer = await opening
        try:
            if answer.status == 200 and answer.content_type == b"text/event-stream":
                await self._pass_stream(answer)
            elif self.reply.started:
                await self._fail_after_pings(answer)
            else:
                await self._pass_body(answer)
        except Silent:
            if self.meter.chunks or self.reply.started:
                message, code = f"The upstream was silent for {settings.idle:g} s.", "upstream_silent"
            else:
                message, code = f"No first byte within {settings.first_byte:g} s.", "first_byte_timeout"
            raise ApiError(504, message, code) from None
        except UpstreamError as error:
            self.forwarding.candidate.upstream.failed(str(error))
            raise ApiError(502, f"The upstream ended the answer early: {error}.", "upstream_died") from None

    async def _pass_stream(self, answer: Answer) -> None:
        settings, meter, reply = self.relay.settings, self.meter, self.reply
        hide_usage = self.call.hide_usage
        silence = settings.first_byte
        while True:
            if settings.ping is None or meter.first_token:
                data = await answer.read(silence)
            else:
                data = await reply.ping_until(asyncio.ensure_future(answer.read(silence)), settings.ping)
            if not data:
                break
            now = time.perf_counter()
            silence = settings.idle
            had_token = meter.first_token
            data = meter.feed(data, hide_usage)
            if meter.first_token and not had_token:
                self.record.ttft_ms = (now - self.arrived) * 1e3
                self.forwarding.first_token(now)
            if data:
                if not reply.started:
                    await reply.start(answer)
                await reply.body(data)
        if not meter.done and answer.header(b"transfer-encoding") is None:
            # Without chunked encoding a cut connection looks like an end.
            raise ApiError(502, "The upstream ended the stream early.", "upstream_died")
        self.forwarding.candidate.upstream.succeeded()
        self.record.http_status = 200
        self.finish("error" if meter.error else "ok", meter.error)
        if not reply.started:
            await reply.start(answer)
        await reply.body(meter.tail, more=False)

    async def _pass_body(self, answer: Answer) -> None:
        """An answer that is no stream. It is kept to read its usage at the end, unless it is too large."""
        settings, reply = self.relay.settings, self.reply
        kept: bytearray | None = bytearray()
        silence = settings.first_byte
        while data := await answer.read(silence):
            silence = settings.idle
            if kept is None:
                await reply.body(data)
                continue
            kept += data
            if len(kept) > MAX_READ_BODY:
                await reply.start(answer, _length(answer))
                await reply.body(bytes(kept))
                kept = None
        self.record.http_status = answer.status
        if answer.status >= 400:
            self.finish("error", f"upstream status {answer.status}")
        else:
            if kept is not None:
                self.meter.read_body(bytes(kept))
            self.forwarding.candidate.upstream.succeeded()
            self.finish("ok")
        if kept is not None:
            await reply.start(answer, len(kept))
        await reply.body(bytes(kept or b""), more=False)

    async def _fail_after_pings(self, answer: Answer) -> None:
        """The stream was opened for pings, and then the upstream sent something else, most likely an error."""
        body = b""
        while len(body) < MAX_ERROR_BODY and (data := await answer.read(self.relay.settings.idle)):
            body += data
        said = storable(body[:MAX_ERROR_BODY].decode("utf-8", "replace"))
        raise ApiError(answer.status, f"The upstream answered {answer.status}: {said}", "upstream_error")

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
        self.forwarding.end()
        record.duration_ms = (time.perf_counter() - self.arrived) * 1e3
        record.prompt_tokens, record.cached_tokens = meter.prompt, meter.cached
        record.completion_tokens = meter.completion
        if meter.completion is None and meter.chunks:
            record.completion_tokens = meter.chunks  # what was observed, where the upstream told nothing
        record.drafted_tokens, record.accepted_tokens = meter.drafted, meter.accepted
        self._take_timing()
        if self.permit is not None:
            self.relay.clerk.limiter.settle(self.permit, record.tokens)
        try:
            self.relay.clerk.record(record)
        except OSError as error:
            log.error("the journal: %s; the end of request %s is not accounted for", error, record.id)
        self.relay.metrics.observe(record, self.key.name)
        if self.relay.tracer is not None:
            self.relay.tracer.span(record, header(self.scope, b"traceparent"))

    def _take_timing(self) -> None:
        """Where the upstream says the time went: its last word, else the head of its answer."""
        answer, timing = self.forwarding.answer, self.meter.timing
        head = answer.header(b"server-timing") if answer is not None else None
        if head is not None:
            timing = server_timing(head.decode("latin-1")) | timing
        record = self.record
        record.queue_ms, record.prefill_ms = timing.get("queue"), timing.get("prefill")
        record.first_decode_ms = timing.get("first_decode")


def storable(text: str | None) -> str | None:
    """An upstream's words, cut, without what a database can't store (NUL, lone surrogates)."""
    return text[:300].replace("\0", "").encode("utf-8", "replace").decode() if text else None


def new_id() -> str:
    """Unique, and in the order of time: 48 bits of milliseconds, 80 random bits."""
    return f"req-{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def _length(answer: Answer) -> int | None:
    value = answer.header(b"content-length")
    return None if value is None else int(value)
