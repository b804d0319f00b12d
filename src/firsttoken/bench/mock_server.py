"""A stand-in for an LLM server: a real program with programmed token times, for tests and measuring relays.

    python -m firsttoken.bench.mock_server --port 8001 --ttft 50ms --itl 10ms

It speaks the stream formats honestly (OpenAI's role, content, finish and usage chunks and `[DONE]`; Anthropic's and
the responses API's named events) and keeps account of what it saw. Answers are words, one token each, and a function
of the prompt alone. Its engine is a caricature with the parts that a benchmark must notice: a prefix cache per
`cache_salt`, slots, a queue with a policy, one prefill at a time, several tokens per chunk when it "speculates".

Routes: /v1/chat/completions, /v1/completions, /v1/messages, /v1/responses, /v1/embeddings, /v1/models, /tokenize,
/health, /version, /metrics, /settings, POST /reconfigure, POST /reset_prefix_cache, GET /seen (?detail=1: a row per
request), DELETE /seen.

One request can ask for its own behaviour with a body field `mock`, which relays pass through:
`{"mock": {"ttft_ms": 5, "itl_ms": 1, "tokens": 8, "status": 503, "error_after": 3, "die_after": 3,
"hang": true}}`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import suppress
from typing import Any

from aiohttp import web

from firsttoken.bench.mock_answers import Account, Answers
from firsttoken.bench.mock_engine import Behaviour, Engine
from firsttoken.bench.mock_formats import STREAMS, error_answer, json_answer, prompt_words


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
        self.model, self.api_key, self.deaf = model, api_key, deaf
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
        self.account = Account()
        self.answers = Answers(behaviour, self.engine, self.account, model)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[self._check_key])
        app.add_routes(
            [
                *(web.post(path, self.answers.text) for path in STREAMS),
                web.post("/v1/embeddings", self.answers.embeddings),
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
            return error_answer(
                401, "Incorrect API key provided.", "invalid_request_error", "invalid_api_key"
            )
        return await handler(request)  # type: ignore[no-any-return]

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        words = prompt_words(body)
        return json_answer({"count": len(words), "tokens": list(range(len(words))), "max_model_len": 8192})

    async def health(self, _: web.Request) -> web.Response:
        return json_answer({})

    async def version(self, _: web.Request) -> web.Response:
        return json_answer({"version": "mock"})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "mock", "max_model_len": 8192}
        return json_answer({"object": "list", "data": [card]})

    async def get_settings(self, _: web.Request) -> web.Response:
        return json_answer({"settings": self.settings, "speculation": self._speculation()})

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
            return error_answer(400, f"unknown settings: {', '.join(unknown)}", "invalid_request_error")
        if self.engine.running or self.engine.waiting:
            return error_answer(409, "requests are running", "conflict")
        if self.deaf:
            return json_answer({"settings": self.settings | changes})
        self.settings.update(changes)
        return json_answer({"settings": self.settings})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        self.engine.prefixes.clear()
        return json_answer({"reset": True})

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
        return json_answer(self.account.totals("detail" in request.query))

    async def delete_seen(self, _: web.Request) -> web.Response:
        self.account.clear()
        return json_answer({})


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
