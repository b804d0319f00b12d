"""The HTTP application: routes, keys, and what becomes of errors. Plain ASGI, with nothing in between."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from firsttoken import __version__
from firsttoken.backends.base import BackendError
from firsttoken.engine.config import ConfigError
from firsttoken.observe.prometheus import CONTENT_TYPE as METRICS_TYPE
from firsttoken.server.chat import chat_prompt
from firsttoken.server.config import ServerConfig
from firsttoken.server.errors import ApiError, bad_request, unavailable
from firsttoken.server.generate import CHAT, COMPLETIONS, Endpoint, generate
from firsttoken.server.generation import Times
from firsttoken.server.http import Connection, Disconnected, Receive, Scope, Send
from firsttoken.server.openapi import Route, openapi
from firsttoken.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from firsttoken.server.serving import Serving
from firsttoken.server.streaming import send_error

log = logging.getLogger("firsttoken.server")

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_GENERATION_ERRORS = (400, 401, 404, 413, 503)


class App:
    """The ASGI application. Until `serving` is set, everything but /version answers 503."""

    def __init__(self, config: ServerConfig) -> None:
        self.serving: Serving | None = None
        self._config = config
        self._body_limit = config.max_body_mib * 2**20
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_key]
        self._root_path = config.root_path.rstrip("/")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending = False
        self.routes = self._routes()
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            path, brace, _ = route.path.partition("{")
            (self._prefixes if brace else self._exact).setdefault(path, {})[route.method] = route
        self._openapi = msgspec.json.encode(openapi(self.routes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._root_path) if self._root_path else scope["path"]
        connection = Connection(scope, receive, send, path, "")
        given = connection.header(b"x-request-id")
        connection.request_id = (
            given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        )
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._dispatch(connection)
        except Disconnected:
            pass
        except ApiError as error:
            await _fail(connection, error)
        except asyncio.CancelledError:
            if not self._ending:
                raise
            task.uncancel()
            await _fail(connection, unavailable("The server is shutting down."))
        except BackendError as error:
            if not connection.started:
                await _fail(connection, unavailable(str(error)))
        except Exception:
            log.exception("%s %s failed (request %s)", scope["method"], path, connection.request_id)
            await _fail(
                connection, ApiError(500, "The server has a bug; its log says more.", code="internal_error")
            )
        finally:
            self._tasks.discard(task)

    def end_requests(self) -> None:
        """Ends every running request with an error; the engine is told to abort them."""
        self._ending = True
        for task in self._tasks:
            task.cancel()

    async def _dispatch(self, connection: Connection) -> None:
        route = self._find(connection.scope["method"], connection.path)
        if not route.is_open:
            self._check_key(connection)
        if self.serving is None and route.path not in ("/version", "/openapi.json"):
            raise unavailable("The model is still being loaded.")
        await route.handler(connection, self.serving)  # type: ignore[arg-type]

    def _find(self, method: str, path: str) -> Route:
        methods = self._exact.get(path)
        if methods is None:
            methods = next(
                (found for prefix, found in self._prefixes.items() if path.startswith(prefix)), None
            )
        if methods is None:
            raise ApiError(404, f"There is no route {path[:200]}.", code="route_not_found")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(
                405,
                f"{path} takes {allowed}, not {method}.",
                code="method_not_allowed",
                headers=[(b"allow", allowed.encode())],
            )
        return route

    def _check_key(self, connection: Connection) -> None:
        if not self._keys:
            return
        scheme, _, token = (connection.header(b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        # Every key is compared, whole: the time taken says nothing of which was near.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "The API key is missing or wrong: send Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )

    # -- routes ----------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        generation_media = ("application/json", "text/event-stream")
        routes = [
            Route(
                method="POST",
                path="/v1/chat/completions",
                handler=self._generation(CHAT),
                summary="Chat completion: the next message of a conversation",
                body=ChatRequest,
                media_types=generation_media,
                errors=_GENERATION_ERRORS,
            ),
            Route(
                method="POST",
                path="/v1/completions",
                handler=self._generation(COMPLETIONS),
                summary="Text completion: what follows a prompt",
                body=CompletionRequest,
                media_types=generation_media,
                errors=_GENERATION_ERRORS,
            ),
            Route(
                method="GET",
                path="/v1/models",
                handler=_models,
                summary="List models: names and context lengths",
            ),
            Route(
                method="GET",
                path="/v1/models/{model}",
                handler=_model,
                summary="Get model: one by its name",
                errors=(401, 404, 503),
            ),
            Route(
                method="POST",
                path="/tokenize",
                handler=self._tokenize,
                summary="Tokenize: the token ids of a prompt or a conversation",
                body=TokenizeRequest,
                errors=_GENERATION_ERRORS,
            ),
            Route(
                method="POST",
                path="/detokenize",
                handler=self._detokenize,
                summary="Detokenize: the text of token ids",
                body=DetokenizeRequest,
                errors=_GENERATION_ERRORS,
            ),
            Route(
                method="GET",
                path="/health",
                handler=_health,
                summary="Health: 200 while the engine is warm and running",
                errors=(503,),
                is_open=True,
            ),
            Route(
                method="GET",
                path="/metrics",
                handler=_metrics,
                summary="Metrics: in Prometheus' text format",
                media_types=("text/plain",),
                errors=(503,),
                is_open=True,
            ),
            Route(
                method="GET",
                path="/version",
                handler=_version,
                summary="Version: of this server",
                errors=(),
                is_open=True,
            ),
            Route(
                method="GET",
                path="/openapi.json",
                handler=self._document,
                summary="OpenAPI: this document",
                errors=(),
                is_open=True,
            ),
        ]
        if self._config.dev_mode:
            routes += [
                Route(
                    method="GET",
                    path="/settings",
                    handler=_settings,
                    summary="Settings: the engine's effective settings and start-up times",
                ),
                Route(
                    method="POST",
                    path="/reset_prefix_cache",
                    handler=_reset_prefix_cache,
                    summary="Reset prefix cache: forget every cached prefix",
                    errors=(401, 409, 503),
                ),
                Route(
                    method="POST",
                    path="/reconfigure",
                    handler=self._reconfigure,
                    summary="Reconfigure: change settings of the running engine",
                    errors=(400, 401, 409, 413, 503),
                ),
            ]
        return routes

    def _generation(self, endpoint: Endpoint) -> Callable[[Connection, Serving], Awaitable[None]]:
        async def handler(connection: Connection, serving: Serving) -> None:
            await generate(connection, serving, endpoint, self._body_limit)

        return handler

    async def _tokenize(self, connection: Connection, serving: Serving) -> None:
        body = await connection.body(self._body_limit)
        await connection.respond(200, await asyncio.to_thread(_tokenized, serving, body))

    async def _detokenize(self, connection: Connection, serving: Serving) -> None:
        request: DetokenizeRequest = parse_body(await connection.body(self._body_limit), DetokenizeRequest)
        serving.check_model(request.model)
        text = await asyncio.to_thread(serving.text.tokenizer.decode, request.tokens, False)
        await _respond_json(connection, {"prompt": text})

    async def _reconfigure(self, connection: Connection, serving: Serving) -> None:
        body = await connection.body(self._body_limit)
        try:
            changes = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise bad_request(f"The body must be a JSON object of settings: {error}.") from None
        for name, value in changes.items():
            try:
                msgspec.msgpack.encode(value)  # as it would travel to the engine's process
            except OverflowError:
                raise bad_request(
                    f"{name}: an integer has more than 64 bits.", name, "invalid_value"
                ) from None
        _check_idle(serving)
        try:
            settings = await serving.backend.reconfigure(changes)
        except ConfigError as error:
            raise bad_request(f"{error}.") from None
        await _respond_json(connection, {"settings": settings})

    async def _document(self, connection: Connection, _: Serving) -> None:
        await connection.respond(200, self._openapi)


async def _fail(connection: Connection, error: ApiError) -> None:
    if connection.started:
        await send_error(connection, error)
    else:
        await connection.respond(error.status, error.body(), headers=error.headers)


async def _respond_json(connection: Connection, content: Mapping[str, Any]) -> None:
    await connection.respond(200, msgspec.json.encode(content))


def _model_card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "firsttoken",
        "root": serving.backend.info.model,
        "parent": None,
        "max_model_len": serving.backend.info.max_model_len,
    }


async def _models(connection: Connection, serving: Serving) -> None:
    cards = [_model_card(serving, name) for name in serving.names]
    await _respond_json(connection, {"object": "list", "data": cards})


async def _model(connection: Connection, serving: Serving) -> None:
    name = unquote(connection.path.removeprefix("/v1/models/"))
    serving.check_model(name)
    await _respond_json(connection, _model_card(serving, name))


def _tokenized(serving: Serving, body: bytes) -> bytes:
    request: TokenizeRequest = parse_body(body, TokenizeRequest)
    serving.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Send either prompt or messages.", "prompt", "invalid_value")
    if request.prompt is not None:
        ids = serving.text.tokenizer.encode(request.prompt, request.add_special_tokens is not False)
    else:
        ids = chat_prompt(serving, request, Times(0.0))
    tokenizer = serving.text.tokenizer
    return msgspec.json.encode(
        {
            "count": len(ids),
            "max_model_len": serving.backend.info.max_model_len,
            "tokens": ids,
            "token_strs": [tokenizer.token_piece(i) for i in ids] if request.return_token_strs else None,
        }
    )


async def _health(connection: Connection, serving: Serving) -> None:
    serving.check_alive()
    await _respond_json(connection, {"status": "ok"})


async def _metrics(connection: Connection, serving: Serving) -> None:
    await connection.respond(200, serving.metrics.render(), METRICS_TYPE)


async def _version(connection: Connection, _: Serving) -> None:
    await _respond_json(connection, {"version": __version__})


async def _settings(connection: Connection, serving: Serving) -> None:
    info = serving.backend.info
    content = {
        "settings": info.settings,
        "startup": info.startup,
        "speculation": serving.backend.stats().speculation,
    }
    await _respond_json(connection, content)


async def _reset_prefix_cache(connection: Connection, serving: Serving) -> None:
    if not await serving.backend.reset_prefix_cache():
        raise _busy()
    await _respond_json(connection, {"reset": True})


def _check_idle(serving: Serving) -> None:
    stats = serving.backend.stats()
    if stats.num_running or stats.num_waiting:
        raise _busy()


def _busy() -> ApiError:
    return ApiError(409, "Requests are running: wait until the server is idle.", code="busy")
