"""Bad input: an OpenAI-shaped error that names the parameter, and never a 422 or 500."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.backends.wire import Submit, pack
from firsttoken.server.config import ServerConfig
from firsttoken.server.schemas import ChatRequest

from .running import Running, running

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"max_token": 1}, "max_token", "'max_tokens'"),
        ({"x": 1}, "x", "Unknown parameter 'x'"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "str"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_k": 1.5}, "top_k", "int"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1000}, "n", "<= 128"),
        ({"seed": 2**63}, "seed", "<="),
        ({"stop": ["a", ""]}, "stop", "stop[1]"),
        ({"stop": ["x"] * 33}, "stop", "at most 32"),
        ({"stop": {}}, "stop", "stop"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "'abc'"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "usage"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "only"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "only"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"store": True}, "store", "false"),
        ({"guided_json": {}}, "guided_json", "not supported"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most 3"),
        ({"messages": []}, "messages", ">= 1"),
        ({"messages": None}, "messages", "required"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "image_url",
        ),
        ({"messages": [{"role": "user"}]}, "messages", "template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
    ],
)
def test_the_parameter_is_named(server: Running, body: dict[str, Any], param: str, says: str) -> None:
    reply = server.chat(**body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert says in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"
    assert not server.backend.requests


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": 1e999}', b"[" * 100_000, b'{"a":"\\ud800"}'],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize", "/reconfigure"])
def test_bodies_that_are_no_json_objects(server: Running, path: str, body: bytes) -> None:
    reply = server.post(path, body)
    assert reply.status == 400
    assert reply.error["message"]


CUT = "cut inside an emoji \\ud83d"
"""JSON as Python's json writes a text that ends in half of a surrogate pair."""


@pytest.mark.parametrize(
    ("field", "param", "says"),
    [
        (f'"messages": [{{"role": "user", "content": "{CUT}"}}]', "messages", "surrogate"),
        (f'"messages": [{{"role": "user", "content": "x", "name": ["{CUT}"]}}]', "messages", "surrogate"),
        ('"cache_salt": "\\udc00"', "cache_salt", "surrogate"),
        ('"stop": ["a", "\\ud800"]', "stop", "surrogate"),
        ('"chat_template_kwargs": {"\\ud800": 1}', "chat_template_kwargs", "surrogate"),
        ('"\\udfff": 1', "\\udfff", "surrogate"),
        ('"temperature": NaN', "temperature", "number"),
        ('"temperature": 1e999', "temperature", "number"),
        ('"logit_bias": {"1": -Infinity}', "logit_bias", "number"),
        (f'"seed": {"9" * 5000}', "seed", "number"),
        (f'"seed": {10**30}', "seed", "<="),
        (f'"priority": {2**63}', "priority", "<="),
        (f'"min_tokens": {-(2**64)}', "min_tokens", ">="),
        (f'"stop_token_ids": [{2**64}]', "stop_token_ids", "<="),
        (f'"ttft_slo_ms": {10**40}', "ttft_slo_ms", "<="),
    ],
)
def test_what_json_can_say_and_no_parameter_can_hold(
    server: Running, field: str, param: str, says: str
) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
    reply = server.post(CHAT, body.encode())
    assert (reply.status, reply.error["param"]) == (400, param)
    assert says in reply.error["message"]
    assert not server.backend.requests


TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
"""With halves of surrogate pairs."""
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(ChatRequest.__struct_fields__)), value=ANYTHING)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_can_be_sent_to_the_engine(server: Running, field: str, value: Any) -> None:
    server.backend.requests.clear()
    reply = server.chat(**{field: value})
    if reply.status == 200:
        assert server.backend.requests
        for request in server.backend.requests:
            pack(Submit(request))
    else:
        assert reply.status == 400 or (field, reply.status) == ("model", 404)
        assert reply.error["param"] == field


def test_too_long_prompts_name_both_lengths(server: Running) -> None:
    words = "fish " * 5000
    for stream in (False, True):
        reply = server.chat(messages=[{"role": "user", "content": words}], stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "messages")
        assert reply.error["code"] == "context_length_exceeded"
        tokens = server.post("/tokenize", {"messages": [{"role": "user", "content": words}]}).json["count"]
        assert f" {tokens} tokens" in reply.error["message"]
        assert "4096 tokens" in reply.error["message"]
    reply = server.chat(max_completion_tokens=4096)
    assert (reply.status, reply.error["param"]) == (400, "max_completion_tokens")
    assert "4096" in reply.error["message"]


def test_unknown_model(server: Running) -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        reply = server.post(path, body | {"model": "gpt-9"})
        assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
        assert "scripted" in reply.error["message"]
    assert server.request("GET", "/v1/models/gpt-9").status == 404
    assert server.request("GET", "/v1/models/scripted").json["max_model_len"] == 4096


def test_routes_and_methods(server: Running) -> None:
    assert server.request("GET", "/v1/nothing").error["code"] == "route_not_found"
    reply = server.request("GET", CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert server.request("DELETE", "/health").status == 405
    head = server.request("HEAD", "/health")
    assert (head.status, head.body) == (200, b"")


def test_body_limit(model_folder: Path) -> None:
    config = ServerConfig(port=0, max_body_mib=1)
    with running(model_folder, config) as server:
        # Said by the length that is announced, without waiting for the body …
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**40}\r\n\r\n".encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        # … and by what arrives, when nothing was announced.
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(2):
                connection.sendall(b"%x\r\n%b\r\n" % (700_000, b" " * 700_000))
            reply = connection.recv(1 << 16)
            assert reply.startswith(b"HTTP/1.1 413 ")
            assert b"--max-body-mib" in reply
        large = {"prompt": "a" * 900_000}
        assert server.post("/v1/completions", large).error["code"] == "context_length_exceeded"


def test_keys(model_folder: Path) -> None:
    with running(model_folder, ServerConfig(port=0, api_key=["one", "two"], dev_mode=True)) as server:
        body = json.dumps({"prompt": "x"}).encode()
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert server.request("POST", "/v1/completions", body, headers).status == 200
        for authorization in ("", "Bearer", "Bearer three", "Bearer on", "one", "Basic one"):
            reply = server.request("POST", "/v1/completions", body, {"authorization": authorization})
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        for path in ("/v1/models", "/settings"):
            assert server.request("GET", path).status == 401
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert server.request("GET", path).status == 200


def test_cross_origin_requests(model_folder: Path) -> None:
    with running(model_folder, ServerConfig(port=0, allowed_origins=["https://chat.example"])) as server:
        headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        reply = server.request("OPTIONS", CHAT, headers=headers)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        reply = server.request("GET", "/health", headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in reply.headers


def test_root_path(model_folder: Path) -> None:
    with running(model_folder, ServerConfig(port=0, root_path="/llm")) as server:
        assert server.request("GET", "/llm/v1/models").status == 200
        assert server.request("GET", "/v1/models").status == 200  # a proxy that strips the prefix
        assert server.request("GET", "/llmx/v1/models").status == 404


def test_dev_routes_only_in_dev_mode(model_folder: Path, server: Running) -> None:
    assert server.request("GET", "/settings").json["settings"]["max_num_seqs"] == 64
    assert server.post("/reset_prefix_cache", b"").json == {"reset": True}
    assert server.post("/reconfigure", {"max_num_seqs": 64}).json["settings"]["max_num_seqs"] == 64
    assert "nothing" in server.post("/reconfigure", {"nothing": 1}).error["message"]
    reply = server.post("/reconfigure", {"max_num_seqs": [2**64]})
    assert (reply.status, reply.error["param"]) == (400, "max_num_seqs")
    server.backend.stopped = True
    with server.open("/v1/completions", {"prompt": "x"}):
        server.until(lambda: bool(server.backend.live), "the request runs")
        for path in ("/reset_prefix_cache", "/reconfigure"):
            assert server.post(path, {}).status == 409
    server.backend.stopped = False
    with running(model_folder, ServerConfig(port=0)) as plain:
        for path in ("/reset_prefix_cache", "/reconfigure"):
            assert plain.post(path, {}).status == 404


def test_no_template(tmp_path: Path) -> None:
    from .models import write_model

    with running(write_model(tmp_path / "m", template=None)) as server:
        assert "--chat-template" in server.chat().error["message"]
        assert server.complete().status == 200


def test_tokenize_and_back(server: Running) -> None:
    reply = server.post("/tokenize", {"prompt": "A server", "return_token_strs": True}).json
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 4096
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "A server"}
    server.chat()
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json
    assert chat["tokens"] == server.backend.requests[-1].prompt_token_ids
    assert server.post("/tokenize", {}).error["param"] == "prompt"
    assert server.post("/tokenize", {"prompt": "x", "temperature": 1}).error["param"] == "temperature"
    assert server.post("/detokenize", {"tokens": [-1]}).error["param"] == "tokens"
