"""What accounting reads of requests and answers, for each API: model, sizes, first token, usage. Nothing else.

Bodies are split at their top level only (msgspec `Raw` keeps the values as bytes), so unknown parameters pass
through untouched and a long prompt costs a scan, not a parse.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

import msgspec

from firsttoken.gateway.errors import ApiError

Api = Literal["chat", "completions", "embeddings", "responses", "messages", "plain"]

ENDPOINTS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/tokenize": "plain",
    "/detokenize": "plain",
}
BYTES_PER_TOKEN = 4
"""For the estimate that is reserved on entry; the settlement uses the upstream's own count."""
MAX_EVENT_BYTES = 8 << 20

_split = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Call:
    """A request body, split at its top level."""

    __slots__ = ("api", "fields", "hide_usage", "model", "output_tokens", "prompt", "stream")

    def __init__(self, api: Api, body: bytes):
        """Raises ApiError 400 for what no upstream could take."""
        try:
            self.fields = _split.decode(body)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"The body is not a JSON object: {error}", "invalid_json") from None
        self.api: Api = api
        model = self._get("model", str | None)
        self.model: str | None = model
        self.stream: bool = bool(self._get("stream", bool | None)) and api not in ("embeddings", "plain")
        self.output_tokens: int | None = None
        if api not in ("embeddings", "plain"):
            for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
                self.output_tokens = self.output_tokens or self._get(name, int | None)
            if self.output_tokens is not None:
                self.output_tokens *= (
                    max(1, self._get("n", int | None) or 1) if api in ("chat", "completions") else 1
                )
        self.prompt = b"".join(
            bytes(self.fields[name])
            for name in ("system", "instructions", "messages", "input", "prompt")
            if name in self.fields
        )
        self.hide_usage = False

    def _get(self, name: str, kind: Any) -> Any:
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"{name}: {error}", "invalid_type", param=name) from None

    def reserve(self, default_output: int) -> int:
        """Tokens to reserve: the prompt by its length, and the most that may be answered."""
        output = 0 if self.api in ("embeddings", "plain") else self.output_tokens or default_output
        return len(self.prompt) // BYTES_PER_TOKEN + 1 + max(0, output)

    def ask_for_usage(self) -> None:
        """Makes a stream end with its usage; `hide_usage` if the client did not ask for that itself."""
        if not self.stream or self.hide_usage or self.api not in ("chat", "completions"):
            return
        options = self._get("stream_options", dict[str, msgspec.Raw] | None) or {}
        self.hide_usage = bytes(options.get("include_usage", b"")) != b"true"
        if self.hide_usage:
            options["include_usage"] = msgspec.Raw(b"true")
            self.fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))

    def set_priority(self, priority: int) -> None:
        """The key's class decides; a client may only step back behind it."""
        own = self._get("priority", int | None) or 0
        self.fields["priority"] = msgspec.Raw(b"%d" % max(own, priority))

    def encode(self, model: str) -> bytes:
        """The body for an upstream that calls the model `model`. One key per name, whatever the client sent."""
        self.fields["model"] = msgspec.Raw(msgspec.json.encode(model))
        return msgspec.json.encode(self.fields)


# ---------------------------------------------------------------- usage


Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""What a database can add up; an upstream that says otherwise is not believed."""


class _Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class _Timing(msgspec.Struct):
    queue_ms: float | None = None
    prefill_ms: float | None = None
    first_decode_ms: float | None = None


class _Speculation(msgspec.Struct):
    drafted_tokens: Tokens | None = None
    accepted_tokens: Tokens | None = None


class _Usage(msgspec.Struct):
    """The usage objects of all APIs in one: each fills its own names. `timing` and `speculation` are our
    server's.
    """

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None
    timing: _Timing | None = None
    speculation: _Speculation | None = None


class _Choice(msgspec.Struct):
    delta: dict[str, Any] | None = None
    text: Any = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    message: Any = None
    """Anthropic: message_start carries the prompt's usage in it."""
    response: _Inner | None = None
    """Responses API: the final events carry the usage in it."""
    delta: Any = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)
_body = msgspec.json.Decoder(_Inner)


class Meter:
    """Follows one answer: when its first token came, and what it used by the last usage that was not null."""

    __slots__ = (
        "accepted",
        "api",
        "cached",
        "chunks",
        "completion",
        "done",
        "drafted",
        "error",
        "first_token",
        "prompt",
        "tail",
        "timing",
    )

    def __init__(self, api: Api):
        self.api: Api = api
        self.first_token = False
        self.chunks = 0
        """Chunks since the first token: the tokens observed, where the upstream tells no usage."""
        self.prompt: int | None = None
        self.cached: int | None = None
        self.completion: int | None = None
        self.drafted: int | None = None
        self.accepted: int | None = None
        self.error: str | None = None
        self.done = False
        self.timing: dict[str, float] = {}
        """Milliseconds of queue, prefill and first_decode, where the upstream tells them."""
        self.tail = b""

    def feed(self, data: bytes, hide_usage: bool) -> bytes:
        """Takes bytes of an event stream as they came; returns the whole events to send on.

        A partial event is kept until its rest comes: a client can't use it, and so an error event can be put
        between events at any time. With `hide_usage` the usage chunk is left out.
        """
        if self.tail:
            data = self.tail + data
            self.tail = b""
        if not data.endswith(b"\n\n") and not data.endswith(b"\r\n\r\n"):
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
            if end < 4:
                end = 2 if data.startswith(b"\n\n") else 0
            self.tail, data = data[end:], data[:end]
            if len(self.tail) > MAX_EVENT_BYTES:
                data, self.tail = data + self.tail, b""
        if not data:
            return b""
        hidden = False
        events = (
            data.split(b"\n\n") if b"\r\n\r\n" not in data else data.replace(b"\r\n", b"\n").split(b"\n\n")
        )
        kept = []
        for event in events:
            if event and self._read(event) and hide_usage:
                hidden = True
            else:
                kept.append(event)
        return b"\n\n".join(kept) if hidden else data

    def _read(self, event: bytes) -> bool:
        """Reads one event; True if it is a chunk that only tells the usage."""
        start = event.find(b"data:")
        if start < 0:
            return False
        payload = event[start + 5 :].strip()
        if self.first_token:
            # Past the first token only usage, errors and the end matter: no parse for the rest.
            if self.api in ("chat", "completions"):
                if b'"usage"' not in payload and b'"error"' not in payload[:12] and payload != b"[DONE]":
                    self.chunks += 1
                    return False
            elif b"_delta" in payload[:64] or b".delta" in payload[:64]:
                self.chunks += b'"message_delta"' not in payload[:64]
                if b'"message_delta"' not in payload[:64]:
                    return False
        if payload == b"[DONE]":
            self.done = True
            return False
        try:
            parsed = _event.decode(payload)
        except msgspec.DecodeError:
            return False
        return self._take(parsed)

    def _take(self, event: _Event) -> bool:
        if event.error is not None:
            message = event.error.get("message") if isinstance(event.error, dict) else event.error
            self.error = str(message)[:300]
        if event.usage is not None:
            self.take_usage(event.usage)
        if event.response is not None and event.response.usage is not None:
            self.take_usage(event.response.usage)
        if self.api == "messages":
            if event.type == "message_start" and isinstance(event.message, dict):
                usage = event.message.get("usage")
                if isinstance(usage, dict):
                    with contextlib.suppress(msgspec.ValidationError):
                        self.take_usage(msgspec.convert(usage, _Usage))
            self.done = self.done or event.type == "message_stop"
            self._token(event.type == "content_block_delta")
        elif self.api == "responses":
            self.done = self.done or event.type in (
                "response.completed",
                "response.incomplete",
                "response.failed",
            )
            if event.type == "response.failed":
                self.error = self.error or "the response failed"
            self._token(bool(event.type and event.type.endswith(".delta") and event.delta))
        elif event.choices is not None:
            if not event.choices:
                return event.usage is not None
            self._token(any(_has_token(choice) for choice in event.choices))
        return False

    def _token(self, is_token: bool) -> None:
        self.first_token = self.first_token or is_token
        self.chunks += is_token

    def take_usage(self, usage: _Usage) -> None:
        details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        cached = _first(details.cached_tokens, usage.cache_read_input_tokens)
        prompt = usage.prompt_tokens
        if prompt is None and usage.input_tokens is not None:
            # Anthropic counts what it read from and wrote to its cache apart from the rest of the prompt.
            prompt = (
                usage.input_tokens
                + (usage.cache_read_input_tokens or 0)
                + (usage.cache_creation_input_tokens or 0)
            )
        self.prompt = _first(prompt, self.prompt)
        self.cached = _first(cached, self.cached)
        self.completion = _first(usage.completion_tokens, usage.output_tokens, self.completion)
        if usage.speculation is not None:
            self.drafted, self.accepted = usage.speculation.drafted_tokens, usage.speculation.accepted_tokens
        if usage.timing is not None:
            self.timing = {
                name: value
                for name in ("queue", "prefill", "first_decode")
                if (value := getattr(usage.timing, f"{name}_ms")) is not None
            }

    def read_body(self, body: bytes) -> None:
        """Reads the usage of an answer that is not a stream."""
        try:
            usage = _body.decode(body).usage
        except msgspec.DecodeError:
            return
        if usage is not None:
            self.take_usage(usage)
            if self.api == "embeddings" and self.completion is None:
                self.completion = 0


def _has_token(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and any(
        delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def server_timing(header: str) -> dict[str, float]:
    """`queue;dur=1.5, prefill;dur=20` → {"queue": 1.5, "prefill": 20.0} (milliseconds)."""
    timing = {}
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            if parameter.startswith("dur="):
                try:
                    timing[name] = float(parameter[4:].strip('"'))
                except ValueError:
                    continue
    return timing
