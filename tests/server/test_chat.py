"""/v1/chat/completions as clients see it: the openai library, and the bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from firsttoken.engine.request import Request, SamplingParams

from .models import EOS, write_model
from .running import Running, running

FOX = "The quick brown fox jumps over the lazy dog."
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def last_request(server: Running) -> Request:
    return server.backend.requests[-1]


def last_sampling(server: Running) -> SamplingParams:
    return last_request(server).sampling


def test_answer(server: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=USER)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", FOX, "stop")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = last_request(server).prompt_token_ids
    assert server.tokenizer.decode(prompt, False) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.prompt_tokens == len(prompt)
    # EOS ends the answer and counts, as everywhere; it is no text.
    assert answer.usage.completion_tokens == len(server.tokenizer.encode(FOX)) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("per_step", [1, 2, 5])
def test_stream(server: Running, client: openai.OpenAI, per_step: int) -> None:
    server.backend.per_step = per_step
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FOX
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(server.tokenizer.encode(FOX)) + 1
    assert len({c.id for c in chunks}) == 1


def test_asynchronous_client(server: Running) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any") as client:
            stream = await client.chat.completions.create(model="scripted", messages=USER, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == FOX


def test_several_choices(server: Running, client: openai.OpenAI) -> None:
    texts = ["red", "green and blue", "a"]
    ids = [server.tokenizer.encode(text) for text in texts]
    server.backend.answer = lambda request: ids[request.choice_index]
    answer = client.chat.completions.create(model="scripted", messages=USER, n=3, seed=7)
    assert [c.message.content for c in answer.choices] == texts
    assert {r.sampling.seed for r in server.backend.requests} == {7}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(last_request(server).prompt_token_ids)
    assert answer.usage.completion_tokens == sum(map(len, ids)) + 3
    streamed: dict[int, str] = {0: "", 1: "", 2: ""}
    roles = []
    for chunk in client.chat.completions.create(model="scripted", messages=USER, n=3, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert list(streamed.values()) == texts
    assert sorted(roles) == [0, 1, 2]


def test_logprobs(server: Running, client: openai.OpenAI) -> None:
    server.says("好!")
    for stream in (False, True):
        arguments: Any = {"model": "scripted", "messages": USER, "logprobs": True, "top_logprobs": 2}
        if stream:
            chunks = client.chat.completions.create(**arguments, stream=True)
            entries = [
                e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []
            ]
        else:
            answer = client.chat.completions.create(**arguments)
            assert answer.choices[0].logprobs is not None
            entries = answer.choices[0].logprobs.content or []
        assert bytes(b for e in entries for b in e.bytes or []) == "好!<|im_end|>".encode()
        assert all(len(e.top_logprobs) == 2 and e.logprob == -0.5 for e in entries)
        assert entries[0].top_logprobs[0].token == entries[0].token


def test_parameters_reach_the_engine(server: Running) -> None:
    server.chat(
        temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, seed=3, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"7": -100, "8": 5.5}, stop_token_ids=[9], ignore_eos=True,
        min_tokens=2, max_completion_tokens=4, priority=-1, cache_salt="salt", ttft_slo_ms=250,
    )  # fmt: skip
    request = last_request(server)
    assert (request.priority, request.cache_salt, request.ttft_slo_ms) == (-1, "salt", 250)
    assert request.arrival_time > 0
    assert request.sampling == SamplingParams(
        temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, seed=3, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={7: -100, 8: 5.5}, stop_token_ids=(9,), ignore_eos=True,
        min_tokens=2, max_tokens=4,
    )  # fmt: skip


def test_max_tokens_is_what_the_context_leaves(server: Running) -> None:
    server.chat()
    request = last_request(server)
    assert request.sampling.max_tokens == server.backend.max_model_len - len(request.prompt_token_ids)
    assert server.chat(max_tokens=2).json["choices"][0]["finish_reason"] == "length"


def test_accepted_without_effect_and_neutral(server: Running) -> None:
    reply = server.chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        prompt_cache_key="k", safety_identifier="s", tools=[], tool_choice="none", best_of=1, suffix=None,
        temperature=None, stop=None, n=None, response_format={"type": "text"}, modalities=["text"],
        length_penalty=1, logit_bias={}, stream_options=None,
    )  # fmt: skip
    assert reply.status == 200
    assert last_sampling(server).temperature == 1.0


def test_stop_token_ids(server: Running) -> None:
    stop = server.tokenizer.encode(FOX)[3]
    for include in (False, True):
        choice = server.chat(stop_token_ids=[stop], include_stop_str_in_output=include).json["choices"][0]
        expected = server.tokenizer.decode(server.tokenizer.encode(FOX)[: 4 if include else 3])
        assert (choice["message"]["content"], choice["stop_reason"]) == (expected, stop)


def test_special_tokens_in_text(server: Running) -> None:
    ids = [*server.tokenizer.encode("a"), 1, *server.tokenizer.encode("b")]
    server.backend.answer = lambda request: ids
    assert server.chat().json["choices"][0]["message"]["content"] == "ab"
    reply = server.chat(skip_special_tokens=False)
    assert reply.json["choices"][0]["message"]["content"] == "a<|im_start|>b"


def test_token_ids(server: Running) -> None:
    reply = server.chat(return_token_ids=True).json
    assert reply["prompt_token_ids"] == last_request(server).prompt_token_ids
    assert reply["choices"][0]["token_ids"] == [*server.tokenizer.encode(FOX), EOS]
    events = server.chat(return_token_ids=True, stream=True).events[:-1]
    assert events[0]["prompt_token_ids"] == last_request(server).prompt_token_ids
    ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert ids == [*server.tokenizer.encode(FOX), EOS]


def test_prompt_logprobs(server: Running) -> None:
    reply = server.chat(prompt_logprobs=1).json
    prompt = last_request(server).prompt_token_ids
    assert reply["prompt_logprobs"][0] is None
    assert [list(entry) for entry in reply["prompt_logprobs"][1:]] == [[str(i)] for i in prompt[1:]]


def test_where_the_time_went(server: Running) -> None:
    reply = server.chat()
    parts = dict(part.split(";dur=") for part in reply.headers["server-timing"].split(", "))
    assert list(parts) == ["template", "tokenize", "queue", "prefill", "first_decode", "first_token"]
    assert (float(parts["queue"]), float(parts["prefill"]), float(parts["first_decode"])) == (1, 2, 3)
    streamed = server.chat(stream=True, stream_options={"include_usage": True})
    assert "prefill;dur=2.000" in streamed.headers["server-timing"]
    timing = streamed.events[-2]["usage"]["timing"]
    assert (timing["queue_ms"], timing["prefill_ms"], timing["first_decode_ms"]) == (1, 2, 3)


def test_usage_in_every_chunk(server: Running) -> None:
    events = server.chat(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == len(server.tokenizer.encode(FOX)) + 1


def test_request_ids(server: Running) -> None:
    reply = server.post("/v1/chat/completions", {"messages": USER}, **{"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json["id"] == "chatcmpl-abc-1"
    made = [server.chat().headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    long = server.post("/v1/chat/completions", {"messages": USER}, **{"x-request-id": "x" * 1000})
    assert len(long.headers["x-request-id"]) < 64


def test_continue_final_message(server: Running) -> None:
    messages = [*USER, {"role": "assistant", "content": "The sky is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert server.post("/v1/chat/completions", body).status == 200
    assert server.tokenizer.decode(last_request(server).prompt_token_ids, False).endswith(
        "assistant\nThe sky is"
    )
    assert server.chat(continue_final_message=True).error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"a": [1, "é"]}', '{"a": [1, "é"]}'),
        ("no JSON", '"no JSON"'),
        ('{"a": "\\ud83d"}', None),
        ("NaN", '"NaN"'),
    ],
)
def test_arguments_of_earlier_tool_calls(tmp_path: Path, arguments: str, rendered: str | None) -> None:
    """Objects for the template where they are JSON, else the text that they are, and never half a character."""
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    with running(write_model(tmp_path / "m", template=template)) as server:
        reply = server.chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert reply.status == 200
        prompt = server.tokenizer.decode(server.backend.requests[-1].prompt_token_ids)
        assert prompt == (json.dumps(arguments) if rendered is None else rendered)
