"""Anthropic's messages and OpenAI's responses pass through unchanged, and are counted by their own usage."""

from __future__ import annotations

import json
import uuid
from typing import Any

import aiohttp
import pytest

from .running import GatewayProgram, Program, call

WORDS = " ".join(f"word{i}" for i in range(40))


def body(path: str, **more: Any) -> dict[str, Any]:
    """A request whose prompt is long enough for the mock's prefix cache; it is the same text in each API."""
    salt = {"model": "mock", "cache_salt": path, **more}
    if path == "/v1/messages":
        return {
            "max_tokens": 6,
            "system": "be brief",
            "messages": [{"role": "user", "content": WORDS}],
            **salt,
        }
    return {"max_output_tokens": 6, "instructions": "be brief", "input": WORDS, **salt}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_upstreams_and_its_usage_is_in_the_ledger(
    path: str, stream: bool, gateway: GatewayProgram, upstream: Program
) -> None:
    ask = body(path, stream=stream)
    async with aiohttp.ClientSession(headers={"x-api-key": gateway.admin}) as http:
        async with http.post(upstream.url + path, json=ask) as answer:
            await answer.read()  # fills the mock's prefix cache
        marker = uuid.uuid4().hex
        async with http.post(gateway.url + path, json=ask, headers={"X-Request-Id": marker}) as answer:
            assert answer.status == 200
            through, own = await answer.read(), answer.headers["X-Gateway-Request-Id"]
        async with http.post(upstream.url + path, json=ask, headers={"X-Request-Id": own}) as answer:
            direct = await answer.read()
    assert texts(path, through, stream) == texts(path, direct, stream) != ""
    row = next(row for row in gateway.rows() if row["id"] == own)
    seen = next(one for one in call("GET", f"{upstream.url}/seen?detail=1")[1]["detail"] if one["id"] == own)
    assert (row["status"], row["endpoint"], row["client_id"]) == ("ok", path.rpartition("/")[2], marker)
    assert row["prompt_tokens"] == seen["prompt_tokens"]
    assert row["cached_tokens"] == seen["cached_tokens"] > 0
    assert row["completion_tokens"] == seen["completion_tokens"] == 6
    assert (row["ttft_ms"] is not None) == stream


def texts(path: str, raw: bytes, stream: bool) -> str:
    """The answer's text, out of whatever its API wraps it in."""
    if stream:
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        deltas = [event["delta"] for event in events if event["type"].endswith("delta") and "delta" in event]
        assert events[-1]["type"] in ("message_stop", "response.completed")
        return "".join(d if isinstance(d, str) else d.get("text", "") for d in deltas)
    answer = json.loads(raw)
    content = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    return str(content[0]["text"])


async def test_the_upstreams_death_is_told_in_the_words_of_each_api(gateway: GatewayProgram) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {gateway.admin}"}) as http:
        for path, last in (
            ("/v1/messages", b'event: error\ndata: {"type": "error"'),
            ("/v1/responses", b"data: [DONE]\n\n"),
        ):
            ask = body(path, stream=True, mock={"die_after": 2})
            async with http.post(gateway.url + path, json=ask) as answer:
                assert last in await answer.read()
