"""The openai client with a real model: what tests/server, with its scripted answers, cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .conftest import NAME, Reference, Server

pytestmark = pytest.mark.long

MESSAGES: Any = [{"role": "user", "content": "用中文说一句话，并加一个 emoji 🙂。"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_several_answers_in_a_stream_are_those_of_one_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": NAME, "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 24, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)
    texts, reasons, tokens = ["", "", ""], [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    usage = None
    for chunk in client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    ):
        assert usage is None  # it comes last
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        if choice.logprobs is not None and choice.logprobs.content:
            tokens[choice.index] += choice.logprobs.content
    assert usage is not None
    assert whole.usage is not None
    assert len(set(texts)) == 3
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert choice.logprobs is not None
        assert [t.token for t in tokens[choice.index]] == [t.token for t in choice.logprobs.content or ()]
    counts = "prompt_tokens", "completion_tokens", "total_tokens"
    assert [getattr(usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert usage.completion_tokens == sum(map(len, tokens))


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, reference: Reference) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=16, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content or []
    data = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert data.decode("utf-8", "ignore").startswith(answer.choices[0].message.content or "?")
    prompt = reference.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids = list(prompt)
    for entry in entries:
        # Greedy: the token is the likeliest of transformers' too, with the same probability.
        ids.append(reference.likeliest(ids))
        expected, _ = reference.score(ids, len(ids) - 1)
        assert entry.token == reference.tokenizer.decode(ids[-1:])
        assert entry.logprob == pytest.approx(expected, abs=2e-4)  # logits within 1e-4
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 3


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == [NAME]
