"""A stand-in for an LLM server: a real program with programmed token times, for tests and measuring relays.

    python -m firsttoken.bench.mock_server --port 8001 --ttft 50ms --itl 10ms

It speaks the OpenAI stream format honestly (role, content, finish and usage chunks, `[DONE]`) and keeps
account of what it saw. Answers are words, one token each, and a function of the prompt alone. Its engine is a
caricature with the parts that a benchmark must notice: a prefix cache per `cache_salt`, slots, a queue with a
policy, one prefill at a time, several tokens per chunk when it "speculates".

Routes: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /tokenize, /health, /version,
/metrics, /settings, POST /reconfigure, POST /reset_prefix_cache, GET /seen (?detail=1: a row per request),
DELETE /seen.

One request can ask for its own behaviour with a body field `mock`, which relays pass through:
`{"mock": {"ttft_ms": 5, "itl_ms": 1, "tokens": 8, "status": 503, "error_after": 3, "die_after": 3,
"hang": true}}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

from firsttoken.bench.mock_engine import Behaviour, Engine, Seen

ANSWER = """the first token of a good answer comes early and then words follow in a steady stream while you
read them so that nobody waits for long and each line is there when the eye wants it"""


def seconds(text: str) -> float:
    """'50ms', '1.5s' or '20us' → seconds. A bare number is seconds."""
    for suffix, scale in (("ms", 1e-3), ("us", 1e-6), ("s", 1.0)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * scale
    return float(text)


class MockServer:
    def __init__(
        self,
        behaviour: Behaviour,
        model: str = "mock",
        api_key: str | None = None,
        slots: int = 64,
        deaf: bool = False,
    ):
        self.behaviour, self.model, self.api_key, self.deaf = behaviour, model, api_key, deaf
        self.settings: dict[str, Any] = {
            "max_num_seqs": slots,
            "max_num_batched_tokens": 2048,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "scheduling_policy": "deadline",
            "ttft_slo_ms": None,
            "itl_target_ms": None,
            "draft": None,
            "num_speculative_tokens": None,
            "speculation": "off",
        }
        self.engine = Engine(behaviour, self.settings)
        self.seen: list[Seen] = []
        self.in_flight = self.max_in_flight = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[self._check_key])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.completions),
                web.post("/v1/completions", self.completions),
                web.post("/v1/embeddings", self.embeddings),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/settings", self.get_settings),
                web.post("/reconfigure", self.reconfigure),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.get("/seen", self.get_seen),
                web.delete("/seen", self.delete_seen),
            ]
        )
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        if self.api_key and request.path.startswith("/v1/") and given != f"Bearer {self.api_key}":
            return _error(401, "Incorrect API key provided.", "invalid_request_error", "invalid_api_key")
        return await handler(request)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        chat = request.path.endswith("chat/completions")
        try:
            body = await request.json()
            words = _prompt_words(body, chat)
        except (ValueError, KeyError, TypeError) as error:
            return _error(400, f"The body is not a valid request: {error!r}", "invalid_request_error")
        how = self.behaviour.with_request(body.get("mock") or {})
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or how.tokens
        seen = Seen(
            id=request.headers.get("X-Request-Id") or f"mock-{len(self.seen)}",
            path=request.path,
            stream=bool(body.get("stream")),
            key=request.headers.get("Authorization"),
            prompt_tokens=len(words),
        )
        self.seen.append(seen)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if how.hang:
                await asyncio.Event().wait()
            if how.status != 200:
                seen.status = "error"
                headers = {"Retry-After": "1"} if how.status in (429, 503) else None
                return _error(how.status, "The mock was told to fail.", "server_error", headers=headers)
            return await self._answer(request, body, words, int(wanted), how, seen, chat)
        except (asyncio.CancelledError, ConnectionResetError):
            seen.status = "disconnected"
            raise
        finally:
            self.in_flight -= 1

    async def _answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        words: list[str],
        wanted: int,
        how: Behaviour,
        seen: Seen,
        chat: bool,
    ) -> web.StreamResponse:
        draw = random.Random("\0".join(words))
        vocabulary = ANSWER.split()
        answer = [draw.choice(vocabulary) + " " for _ in range(wanted)]
        arrived = time.perf_counter()
        stream = _Stream(request, seen, self.model, chat) if seen.stream else None
        if stream and (how.role_first or how.empty_first or how.ping):
            await stream.open()
            if how.role_first and chat:
                await stream.role()
            if how.empty_first:
                await stream.content("")
        pinger = asyncio.create_task(_ping(stream, how.ping)) if stream and how.ping else None
        engine = self.engine
        try:
            await engine.enter(len(words))
            try:
                scheduled = time.perf_counter()
                seen.cached_tokens = engine.match(words, body.get("cache_salt"))
                engine.counters["prompt"] += len(words)
                if how.prefill:
                    async with engine.prefill_lock:
                        await asyncio.sleep(how.prefill * (len(words) - seen.cached_tokens))
                due = scheduled + how.ttft if not how.prefill else time.perf_counter() + how.ttft
                await _sleep_until(due)
                if pinger:
                    pinger.cancel()
                timing = {
                    "queue": (scheduled - arrived) * 1e3,
                    "prefill": (time.perf_counter() - scheduled) * 1e3,
                }
                per_chunk, sent, chunks = how.tokens_per_chunk, 0, 0
                if self.settings["speculation"] == "always":
                    per_chunk = max(per_chunk, 2)
                while sent < wanted:
                    count = 1 if sent == 0 else min(per_chunk, wanted - sent)
                    if stream:
                        if not stream.opened:
                            await stream.open(_server_timing(timing))
                        if chunks == how.die_after:
                            return stream.die()
                        if chunks == how.error_after:
                            return await stream.fail()
                        if chat and not stream.role_sent:
                            await stream.role()
                        await stream.content("".join(answer[sent : sent + count]))
                    sent, chunks = sent + count, chunks + 1
                    seen.completion_tokens = sent
                    engine.counters["generated"] += count
                    if count > 1 and per_chunk > how.tokens_per_chunk:
                        engine.counters["drafts"] += 1
                        engine.counters["drafted"] += per_chunk
                        engine.counters["accepted"] += count - 1
                    if sent < wanted:
                        due += how.itl * (1 + how.jitter * draw.uniform(-1, 1))
                        await _sleep_until(due)
                        timing.setdefault("first_decode", how.itl * 1e3)
            finally:
                engine.leave()
        finally:
            if pinger:
                pinger.cancel()
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": wanted,
            "total_tokens": len(words) + wanted,
            "prompt_tokens_details": {"cached_tokens": seen.cached_tokens},
            "timing": {f"{name}_ms": round(value, 3) for name, value in timing.items()},
        }
        seen.status = "ok"
        if stream:
            include = bool((body.get("stream_options") or {}).get("include_usage"))
            return await stream.close(usage if include else None)
        text = "".join(answer)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reply = _envelope(seen.id, self.model, chat, stream=False) | {"choices": [choice], "usage": usage}
        return _json(reply, headers={"Server-Timing": _server_timing(timing), "X-Request-Id": seen.id})

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        tokens = sum(len(str(text).split()) for text in texts)
        self.seen.append(
            Seen(
                id=request.headers.get("X-Request-Id") or f"mock-{len(self.seen)}",
                path=request.path,
                stream=False,
                key=request.headers.get("Authorization"),
                prompt_tokens=tokens,
                status="ok",
            )
        )
        data = [{"object": "embedding", "index": i, "embedding": [0.0, 1.0]} for i in range(len(texts))]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "model": self.model, "data": data, "usage": usage})

    # ---------------------------------------------------------------- everything else

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        words = _prompt_words(body, chat="messages" in body)
        return _json({"count": len(words), "tokens": list(range(len(words))), "max_model_len": 8192})

    async def health(self, _: web.Request) -> web.Response:
        return _json({})

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": "mock"})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "mock", "max_model_len": 8192}
        return _json({"object": "list", "data": [card]})

    async def get_settings(self, _: web.Request) -> web.Response:
        return _json({"settings": self.settings, "speculation": self._speculation()})

    def _speculation(self) -> dict[str, Any]:
        mode = self.settings["speculation"]
        reason = {
            "off": "turned off",
            "always": "always on",
            "auto": "drafts are accepted too rarely to pay",
        }[mode]
        return {"on": mode == "always", "gamma": 1 if mode == "always" else 0, "reason": reason}

    async def reconfigure(self, request: web.Request) -> web.Response:
        changes = await request.json()
        unknown = sorted(set(changes) - set(self.settings))
        if unknown:
            return _error(400, f"unknown settings: {', '.join(unknown)}", "invalid_request_error")
        if self.engine.running or self.engine.waiting:
            return _error(409, "requests are running", "conflict")
        if self.deaf:
            return _json({"settings": self.settings | changes})
        self.settings.update(changes)
        return _json({"settings": self.settings})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.engine.prefixes.clear()
        return _json({"reset": True})

    async def metrics(self, _: web.Request) -> web.Response:
        c, engine = self.engine.counters, self.engine
        cpu = time.process_time()
        lines = {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": len(engine.waiting),
            "vllm:prefix_cache_queries_total": c["queries"],
            "vllm:prefix_cache_hits_total": c["hits"],
            "vllm:prompt_tokens_total": c["prompt"],
            "vllm:generation_tokens_total": c["generated"],
            "vllm:spec_decode_num_drafts_total": c["drafts"],
            "vllm:spec_decode_num_draft_tokens_total": c["drafted"],
            "vllm:spec_decode_num_accepted_tokens_total": c["accepted"],
            "firsttoken:engine_cpu_seconds_total": cpu,
        }
        label = f'{{model_name="{self.model}",engine="0"}}'
        text = "".join(f"{name}{label} {value}\n" for name, value in lines.items())
        return web.Response(text=text, content_type="text/plain")

    async def get_seen(self, request: web.Request) -> web.Response:
        count = {s: 0 for s in ("running", "ok", "disconnected", "died", "error")}
        for row in self.seen:
            count[row.status] += 1
        totals = {
            "requests": len(self.seen),
            "by_status": count,
            "prompt_tokens": sum(row.prompt_tokens for row in self.seen),
            "completion_tokens": sum(row.completion_tokens for row in self.seen),
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
        }
        if "detail" in request.query:
            totals["detail"] = [row.__dict__ for row in self.seen]
        return _json(totals)

    async def delete_seen(self, _: web.Request) -> web.Response:
        self.seen.clear()
        self.max_in_flight = self.in_flight
        return _json({})


class _Stream:
    """One server-sent event stream in OpenAI's chunk format."""

    def __init__(self, request: web.Request, seen: Seen, model: str, chat: bool):
        self.request, self.seen, self.chat = request, seen, chat
        self.envelope = _envelope(seen.id, model, chat, stream=True)
        self.response: web.StreamResponse | None = None
        self.role_sent = False

    @property
    def opened(self) -> bool:
        return self.response is not None

    async def open(self, server_timing: str | None = None) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers |= {"X-Accel-Buffering": "no", "X-Request-Id": self.seen.id}
        if server_timing:
            headers["Server-Timing"] = server_timing
        self.response = web.StreamResponse(headers=headers)
        await self.response.prepare(self.request)

    async def write(self, text: str) -> None:
        assert self.response is not None
        await self.response.write(text.encode())

    async def event(self, data: dict[str, Any]) -> None:
        await self.write(f"data: {json.dumps(data, separators=(',', ':'))}\n\n")

    async def _choice(self, finish_reason: str | None = None, **what: Any) -> None:
        choice = {"index": 0, **what, "logprobs": None, "finish_reason": finish_reason}
        await self.event(self.envelope | {"choices": [choice]})

    async def role(self) -> None:
        self.role_sent = True
        await self._choice(delta={"role": "assistant", "content": ""})

    async def content(self, text: str) -> None:
        await (self._choice(delta={"content": text}) if self.chat else self._choice(text=text))

    async def close(self, usage: dict[str, Any] | None) -> web.StreamResponse:
        await (self._choice("length", delta={}) if self.chat else self._choice("length", text=""))
        if usage:
            await self.event(self.envelope | {"choices": [], "usage": usage})
        await self.write("data: [DONE]\n\n")
        return await self._eof()

    async def fail(self) -> web.StreamResponse:
        self.seen.status = "error"
        error = {
            "message": "The mock was told to fail here.",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        await self.event({"error": error})
        await self.write("data: [DONE]\n\n")
        return await self._eof()

    async def _eof(self) -> web.StreamResponse:
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    def die(self) -> web.StreamResponse:
        """Cuts the connection in the middle of the answer, as a killed server does."""
        assert self.response is not None
        self.seen.status = "died"
        if self.request.transport:
            self.request.transport.abort()
        return self.response


async def _ping(stream: _Stream, every: float) -> None:
    with suppress(ConnectionResetError):
        while True:
            await asyncio.sleep(every)
            await stream.write(": ping\n\n")


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))


def _prompt_words(body: dict[str, Any], chat: bool) -> list[str]:
    """The prompt as the mock's tokens: its words, with a header per message."""
    if not chat:
        prompt = body["prompt"]
        return prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
    words: list[str] = []
    for message in body["messages"]:
        content = message["content"]
        text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        words += [f"<{message['role']}>", *text.split()]
    return [*words, "<assistant>"]


def _envelope(request_id: str, model: str, chat: bool, stream: bool) -> dict[str, Any]:
    kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and stream else "")
    prefix = "chatcmpl" if chat else "cmpl"
    return {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}


def _server_timing(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name};dur={value:.3f}" for name, value in milliseconds.items())


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(data, status=status, headers=headers)


def _error(
    status: int, message: str, kind: str, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return _json({"error": error}, status=status, headers=headers)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m firsttoken.bench.mock_server", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0: a free one; it is printed")
    p.add_argument("--model", default="mock")
    p.add_argument("--api-key")
    p.add_argument("--slots", type=int, default=64, help="requests served at once; others queue")
    p.add_argument("--deaf", action="store_true", help="/reconfigure says yes and changes nothing")
    p.add_argument("--ttft", type=seconds, default=0.05, help="as 50ms")
    p.add_argument("--prefill", type=seconds, default=0.0, help="per uncached prompt token, as 500us")
    p.add_argument("--itl", type=seconds, default=0.01)
    p.add_argument("--jitter", type=float, default=0.0)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--tokens-per-chunk", type=int, default=1)
    p.add_argument("--role-first", action="store_true", help="role chunk ahead of the first token")
    p.add_argument("--empty-first", action="store_true", help="empty chunk ahead of the first token")
    p.add_argument("--ping", type=seconds, help="comments before the first token, this often")
    p.add_argument("--error-after", type=int)
    p.add_argument("--die-after", type=int)
    return p


async def serve(args: argparse.Namespace) -> None:
    behaviour = Behaviour(**{k: v for k, v in vars(args).items() if k in Behaviour.__dataclass_fields__})
    server = MockServer(behaviour, args.model, args.api_key, args.slots, args.deaf)
    # handler_cancellation: a client that leaves is noticed while the handler sleeps, not at its next write.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port, backlog=4096)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    print(f"mock server ready on http://{args.host}:{port}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with suppress(KeyboardInterrupt):
        try:
            import uvloop

            uvloop.run(serve(args))
        except ImportError:
            asyncio.run(serve(args))


if __name__ == "__main__":
    main()
