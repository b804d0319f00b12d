"""One request's way to an upstream: which one, what it is sent, and what its load counters learn of it."""

from __future__ import annotations

import time

from firsttoken.gateway.accounts import Key
from firsttoken.gateway.asgi import Scope
from firsttoken.gateway.config import GatewayConfig
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.journal import Record
from firsttoken.gateway.routing import Candidate, Route, Router
from firsttoken.gateway.tracing import Tracer
from firsttoken.gateway.upstream_http import Answer, Silent, UpstreamError
from firsttoken.gateway.upstreams import Upstream
from firsttoken.gateway.usage import Call

PASSED_ON = {
    b"accept": "Accept",
    b"user-agent": "User-Agent",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"anthropic-version": "anthropic-version",
    b"anthropic-beta": "anthropic-beta",
    b"openai-beta": "OpenAI-Beta",
}
"""Request headers that upstreams get to see. Credentials and cookies are not among them."""
RETRY_STATUS = (429, 502, 503, 504)


class Forwarding:
    """`open` once; then `first_token` when it comes, and `end` in any case."""

    def __init__(self, call: Call, route: Route, key: Key, record: Record, arrived: float):
        """arrived: `time.perf_counter()` when the request's head was read."""
        self.call, self.route, self.key, self.record = call, route, key, record
        self.arrived = arrived
        self.candidate = route.candidates[0]
        self.answer: Answer | None = None
        self.forwarded = 0.0
        self.ahead = 0
        """Requests that waited at the upstream when this one was sent."""
        self.waiting_at: Candidate | None = None
        self.waits = False

    async def open(
        self, settings: GatewayConfig, router: Router, tracer: Tracer | None, scope: Scope
    ) -> Answer:
        """The upstream's answer, its head read: of the best candidate, or of the next while nothing was sent.
        ApiError 502, 503 or 504."""
        candidates = self.route.candidates[: settings.retries + 1]
        failure = ApiError(503, "No upstream.", "no_upstream")
        path = scope["path"].removeprefix(settings.root_path)
        for candidate in candidates:
            upstream = self._choose(candidate)
            body = self._body(candidate)
            headers = self._headers(candidate, scope, tracer)
            router.sent(self.route.prefix, upstream)
            self.record.attempts += 1
            self.forwarded = time.perf_counter()
            if self.record.gateway_ms is None:
                self.record.gateway_ms = (self.forwarded - self.arrived) * 1e3
            try:
                answer = await upstream.http.request("POST", path, headers, body, settings.first_byte)
            except Silent:
                # It had its time; another try would double the wait and the work.
                message = f"No answer within {settings.first_byte:g} s."
                raise ApiError(504, message, "first_byte_timeout") from None
            except UpstreamError as error:
                upstream.failed(str(error))
                failure = ApiError(502, f"The upstream can't be reached: {error}.", "upstream_unreachable")
                self._leave()
                continue
            if answer.status in RETRY_STATUS and candidate is not candidates[-1]:
                answer.close()
                self._leave()
                continue
            self.answer = answer
            return answer
        raise failure

    def _choose(self, candidate: Candidate) -> Upstream:
        self.candidate = candidate
        upstream = candidate.upstream
        self.record.model, self.record.upstream = candidate.model, upstream.name
        self.ahead, self.waiting_at, self.waits = upstream.waiting, candidate, True
        upstream.waiting += 1
        upstream.in_flight += 1
        return upstream

    def _body(self, candidate: Candidate) -> bytes:
        config, call = candidate.upstream.config, self.call
        if config.priority:
            call.set_priority(self.key.priority)
        if config.stream_usage:
            call.ask_for_usage()
        return call.encode(candidate.model)

    def _headers(self, candidate: Candidate, scope: Scope, tracer: Tracer | None) -> str:
        """Header lines for the upstream."""
        headers = {
            PASSED_ON[name]: value.decode("latin-1") for name, value in scope["headers"] if name in PASSED_ON
        }
        if tracer is not None:
            headers["traceparent"] = tracer.traceparent(self.record.id, headers.get("traceparent"))
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        return f"{candidate.upstream.header_lines(self.call.api)}X-Request-Id: {self.record.id}\r\n{lines}"

    def first_token(self, now: float) -> None:
        """The first token came at `now`, by `time.perf_counter()`."""
        if self.waiting_at is not None and self.waits:
            self.waits = False
            self.waiting_at.upstream.waiting -= 1
            self.waiting_at.upstream.observe(now - self.forwarded, self.ahead)

    def end(self) -> None:
        """The request is over: an answer that isn't complete is cancelled at the upstream."""
        self._leave()
        if self.answer is not None:
            self.answer.close()

    def _leave(self) -> None:
        if self.waiting_at is not None:
            self.waiting_at.upstream.waiting -= self.waits
            self.waiting_at.upstream.in_flight -= 1
            self.waiting_at, self.waits = None, False
