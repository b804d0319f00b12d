"""What the mock server writes: answers and event streams in the formats of chat and text completions, Anthropic's
messages and OpenAI's responses, with usage where each of them has it."""

from __future__ import annotations

import json
import time
from typing import Any

from aiohttp import web

from firsttoken.bench.mock_engine import Seen

Usage = dict[str, Any]
"""As chat completions have it; the other formats rename its fields."""


class EventStream:
    """One server-sent event stream. `opened` when the first byte goes out, which may be before the first token."""

    def __init__(self, request: web.Request, seen: Seen, model: str):
        self.request, self.seen, self.model = request, seen, model
        self.response: web.StreamResponse | None = None
        self.role_sent = False

    @property
    def opened(self) -> bool:
        return self.response is not None

    async def open(self, timing: str | None = None) -> None:
        """timing: a Server-Timing header."""
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        headers |= {"X-Accel-Buffering": "no", "X-Request-Id": self.seen.id}
        if timing:
            headers["Server-Timing"] = timing
        self.response = web.StreamResponse(headers=headers)
        await self.response.prepare(self.request)

    async def write(self, text: str) -> None:
        assert self.response is not None
        await self.response.write(text.encode())

    async def event(self, data: dict[str, Any], name: str | None = None) -> None:
        head = f"event: {name}\n" if name else ""
        await self.write(f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n")

    async def role(self) -> None:
        """What comes ahead of the first token."""
        raise NotImplementedError

    async def content(self, text: str) -> None:
        raise NotImplementedError

    async def close(self, usage: Usage, asked: bool) -> web.StreamResponse:
        """The regular end. asked: the request has `stream_options.include_usage`."""
        raise NotImplementedError

    async def fail(self) -> web.StreamResponse:
        """An error inside a stream that began well."""
        self.seen.status = "error"
        message = "The mock was told to fail here."
        await self.event({"error": {"message": message, "type": "server_error", "param": None, "code": None}})
        await self.write("data: [DONE]\n\n")
        return await self.end()

    def die(self) -> web.StreamResponse:
        """Cuts the connection in the middle of the answer, as a killed server does."""
        assert self.response is not None
        self.seen.status = "died"
        if self.request.transport:
            self.request.transport.abort()
        return self.response

    async def end(self) -> web.StreamResponse:
        assert self.response is not None
        await self.response.write_eof()
        return self.response


class Completions(EventStream):
    """/v1/chat/completions and /v1/completions."""

    def __init__(self, request: web.Request, seen: Seen, model: str):
        super().__init__(request, seen, model)
        self.chat = request.path.endswith("chat/completions")
        self.envelope = completion_envelope(seen.id, model, self.chat, stream=True)

    async def _choice(self, finish_reason: str | None = None, **what: Any) -> None:
        choice = {"index": 0, **what, "logprobs": None, "finish_reason": finish_reason}
        await self.event(self.envelope | {"choices": [choice]})

    async def role(self) -> None:
        self.role_sent = True
        if self.chat:
            await self._choice(delta={"role": "assistant", "content": ""})

    async def content(self, text: str) -> None:
        await (self._choice(delta={"content": text}) if self.chat else self._choice(text=text))

    async def close(self, usage: Usage, asked: bool) -> web.StreamResponse:
        await (self._choice("length", delta={}) if self.chat else self._choice("length", text=""))
        if asked:
            await self.event(self.envelope | {"choices": [], "usage": usage})
        await self.write("data: [DONE]\n\n")
        return await self.end()


class Messages(EventStream):
    """/v1/messages: the prompt's usage comes first, the answer's last; cached tokens are counted apart."""

    async def _named(self, kind: str, **data: Any) -> None:
        await self.event({"type": kind, **data}, kind)

    async def role(self) -> None:
        self.role_sent = True
        usage = messages_usage({"prompt_tokens": self.seen.prompt_tokens}, self.seen.cached_tokens, 1)
        message = messages_body(self.seen.id, self.model, "", usage)
        await self._named("message_start", message=message | {"content": [], "stop_reason": None})
        await self._named("content_block_start", index=0, content_block={"type": "text", "text": ""})

    async def content(self, text: str) -> None:
        await self._named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    async def close(self, usage: Usage, asked: bool) -> web.StreamResponse:
        await self._named("content_block_stop", index=0)
        own = {"output_tokens": usage["completion_tokens"]}
        await self._named("message_delta", delta={"stop_reason": "max_tokens"}, usage=own)
        await self._named("message_stop")
        return await self.end()


class Responses(EventStream):
    """/v1/responses: the whole response, with its usage, is in the last event."""

    text = ""

    async def _named(self, kind: str, **data: Any) -> None:
        await self.event({"type": kind, **data}, kind)

    async def role(self) -> None:
        self.role_sent = True
        await self._named(
            "response.created", response={"id": self.seen.id, "status": "in_progress", "usage": None}
        )

    async def content(self, text: str) -> None:
        self.text += text
        await self._named("response.output_text.delta", item_id="msg", output_index=0, delta=text)

    async def close(self, usage: Usage, asked: bool) -> web.StreamResponse:
        body = responses_body(self.seen.id, self.model, self.text, usage)
        await self._named("response.completed", response=body)
        return await self.end()


STREAMS: dict[str, type[EventStream]] = {
    "/v1/chat/completions": Completions,
    "/v1/completions": Completions,
    "/v1/messages": Messages,
    "/v1/responses": Responses,
}


def whole(path: str, id: str, model: str, text: str, usage: Usage) -> dict[str, Any]:
    """An answer that is no stream, in the format of `path`."""
    if path == "/v1/messages":
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return messages_body(id, model, text, messages_usage(usage, cached, usage["completion_tokens"]))
    if path == "/v1/responses":
        return responses_body(id, model, text, usage)
    chat = path.endswith("chat/completions")
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return completion_envelope(id, model, chat, stream=False) | {"choices": [choice], "usage": usage}


def completion_envelope(id: str, model: str, chat: bool, stream: bool) -> dict[str, Any]:
    kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and stream else "")
    prefix = "chatcmpl" if chat else "cmpl"
    return {"id": f"{prefix}-{id}", "object": kind, "created": int(time.time()), "model": model}


def messages_usage(usage: Usage, cached: int, output: int) -> dict[str, int]:
    fresh = usage["prompt_tokens"] - cached
    return {"input_tokens": fresh, "cache_read_input_tokens": cached, "output_tokens": output}


def messages_body(id: str, model: str, text: str, usage: dict[str, int]) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    kind = {"type": "message", "role": "assistant", "stop_reason": "max_tokens"}
    return {"id": id, **kind, "model": model, "content": content, "usage": usage}


def responses_body(id: str, model: str, text: str, usage: Usage) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}
    counts = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }
    kind = {"object": "response", "status": "completed", "created_at": int(time.time())}
    return {"id": id, **kind, "model": model, "output": [message], "usage": counts}


def prompt_words(body: dict[str, Any]) -> list[str]:
    """The prompt of a request as the mock's tokens: its words, with a header per message."""
    if "prompt" in body:
        prompt = body["prompt"]
        return prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
    words = [*str(body.get("system") or body.get("instructions") or "").split()]
    messages = body["input"] if "input" in body else body["messages"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        words += [f"<{message['role']}>", *text.split()]
    return [*words, "<assistant>"]


def server_timing(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{name};dur={value:.3f}" for name, value in milliseconds.items())


def json_answer(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(data, status=status, headers=headers)


def error_answer(
    status: int, message: str, kind: str, code: str | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json_answer({"error": error}, status=status, headers=headers)
