"""/v1/completions: every form of prompt, echo and logprobs as lm-eval needs them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .models import EOS
from .running import Running

FOX = "The quick brown fox jumps over the lazy dog."


def prompts(server: Running) -> list[list[int]]:
    return [request.prompt_token_ids for request in server.backend.requests]


def test_prompts_as_text_and_as_tokens(server: Running) -> None:
    a, b = server.tokenizer.encode("A server"), server.tokenizer.encode("Numbers: 3")
    forms: list[tuple[Any, list[list[int]]]] = [
        ("A server", [a]),
        (["A server"], [a]),
        (["A server", "Numbers: 3"], [a, b]),
        (a, [a]),
        ([a, b], [a, b]),
    ]
    for prompt, expected in forms:
        server.backend.requests.clear()
        reply = server.complete(prompt=prompt, max_tokens=100)
        assert [choice["text"] for choice in reply.json["choices"]] == [FOX] * len(expected)
        assert prompts(server) == expected
        assert reply.json["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_default_is_sixteen_tokens(server: Running) -> None:
    server.says("word " * 50)
    assert server.complete().json["usage"]["completion_tokens"] == 16


def test_openai_client(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any") as client:
        answer = client.completions.create(model="scripted", prompt=["a", "b"], n=2, max_tokens=99)
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (i, FOX, "stop") for i in range(4)
        ]
        chunks = list(client.completions.create(model="scripted", prompt="a", max_tokens=99, stream=True))
        assert "".join(c.choices[0].text for c in chunks) == FOX
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_prompt(server: Running, max_tokens: int) -> None:
    """As lm-eval's local-completions asks: echo and logprobs, at most one token made."""
    context, rest = server.tokenizer.encode("Numbers: "), server.tokenizer.encode("1024, 🙂")
    body = {
        "prompt": [context + rest],
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    reply = server.complete(**body).json
    logprobs = reply["choices"][0]["logprobs"]
    count = len(context + rest) + max_tokens
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, count)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-0.5] * (count - 1)
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top[token] == -0.5
    # Tokens that are no whole character have names of their own.
    assert sum(name.startswith("bytes:\\x") for name in logprobs["tokens"]) > 0
    assert reply["choices"][0]["text"].startswith("Numbers: 1024, 🙂")
    assert reply["usage"]["completion_tokens"] == max_tokens


def test_text_offsets(server: Running) -> None:
    choice = server.complete(prompt="A server", echo=True, logprobs=0, max_tokens=3).json["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_echo(server: Running) -> None:
    assert (
        server.complete(prompt="Say: ", echo=True, max_tokens=99).json["choices"][0]["text"] == "Say: " + FOX
    )
    ids = server.tokenizer.encode("Say: ")
    assert server.complete(prompt=ids, echo=True, max_tokens=99).json["choices"][0]["text"] == "Say: " + FOX
    events = server.complete(prompt=["Say: "], echo=True, max_tokens=99, stream=True).events[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == "Say: " + FOX


def test_logprobs_in_a_stream(server: Running) -> None:
    events = server.complete(logprobs=2, max_tokens=99, stream=True).events[:-1]
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(tokens) == FOX + "<|im_end|>"
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


def test_token_names_as_ids(server: Running) -> None:
    logprobs = server.complete(logprobs=0, max_tokens=2, return_tokens_as_token_ids=True).json["choices"][0][
        "logprobs"
    ]
    first, second = server.tokenizer.encode(FOX)[:2]
    assert logprobs["tokens"] == [f"token_id:{first}", f"token_id:{second}"]


def test_prompt_logprobs_and_token_ids(server: Running) -> None:
    choice = server.complete(prompt_logprobs=0, return_token_ids=True, max_tokens=99).json["choices"][0]
    ids = server.tokenizer.encode("Hi")
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == [*server.tokenizer.encode(FOX), EOS]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": server.tokenizer.token_bytes(ids[1]).decode(),
    }


def test_what_vllm_bench_serve_sends(server: Running) -> None:
    body = {
        "model": "scripted", "prompt": "Hi", "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 8,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    events = server.post("/v1/completions", body).events
    assert events[-2]["usage"]["completion_tokens"] == 8
    assert all("choices" in event for event in events[:-1])


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1.5], [True], [["a"]], [1, "a"], [-1], [10**6], {}, 5, [[1], "a", None]]
)
def test_prompts_that_are_none(server: Running, prompt: Any) -> None:
    reply = server.complete(prompt=prompt)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
