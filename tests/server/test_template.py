"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firsttoken.engine.config import ConfigError
from firsttoken.server.errors import ApiError
from firsttoken.server.template import ChatTemplate, load_chat_template
from firsttoken.server.text import Tokenizer

from .models import CHATML, write_model

INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
HEADERS = """{%- set ns = namespace(system=none) %}
{%- for message in messages if message.role in ["system", "developer"] %}
    {%- set ns.system = message.content %}
    {%- break %}
{%- endfor %}
{{- bos_token }}
{%- if ns.system is not none %}
<|system|>{{ ns.system | trim }}
{%- endif %}
{% for message in messages %}
    {% if message.role == "tool" %}
<|tool|>{{ message | tojson }}
    {% elif message.tool_calls is defined %}
        {% for call in message.tool_calls %}
<|call|>{{ call.function.name }} {{ call.function.arguments | tojson(indent=2) }}
        {% endfor %}
    {% elif message.role in ("user", "assistant") %}
<|{{ message.role }}|>{{ message.content }}{{ message.reasoning_content | default("", true) }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}
<think></think>{% endif %}{% endif %}"""
PARTS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}|{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS, "parts": PARTS}

PLAIN = [
    {"role": "user", "content": " <b>Hi</b> & 'hello' "},
    {"role": "assistant", "content": "Ja, 你好 🙂"},
    {"role": "user", "content": "two\nlines"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": PLAIN,
    "system": [{"role": "system", "content": "Be brief. "}, *PLAIN],
    "developer": [{"role": "developer", "content": "Be <kind>."}, *PLAIN],
    "reasoning": [*PLAIN[:1], {"role": "assistant", "content": "x", "reasoning": "because"}, PLAIN[2]],
}
TOOLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "w", "arguments": {"at": "<köln>"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"sun": true} <&>'},
]


@pytest.fixture(params=TEMPLATES, scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, ChatTemplate]:
    """(name, transformers' tokenizer, our template) of one model folder."""
    from transformers import PreTrainedTokenizerFast

    folder = write_model(tmp_path_factory.mktemp("template") / "m", template=TEMPLATES[request.param])
    ours = Tokenizer(folder)
    template = load_chat_template(folder, ours.config, ours.special_tokens, None)
    assert template is not None
    return request.param, PreTrainedTokenizerFast.from_pretrained(folder), template


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_same_text_as_transformers(pair: Any, conversation: str, generation_prompt: bool) -> None:
    name, theirs, ours = pair
    messages = CONVERSATIONS[conversation]
    try:
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception:
        assert name == "inst"  # the one that raises for a system message
        with pytest.raises(ApiError, match="must alternate") as raised:
            ours.render(messages, add_generation_prompt=generation_prompt)
        assert (raised.value.status, raised.value.param) == (400, "messages")
        return
    assert ours.render(messages, add_generation_prompt=generation_prompt) == expected


@pytest.mark.parametrize("pair", ["headers"], indirect=True)
def test_variables_and_tools(pair: Any) -> None:
    _, theirs, ours = pair
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        expected = theirs.apply_chat_template(TOOLS, tokenize=False, add_generation_prompt=True, **kwargs)
        assert ours.render(TOOLS, kwargs=kwargs) == expected


def test_continued_message(pair: Any) -> None:
    _, theirs, ours = pair
    for content in ("The answer is", "The answer is ", "Ends with a newline\n"):
        messages = [*PLAIN, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert ours.render(messages, continue_final_message=True) == expected


def test_text_parts(pair: Any) -> None:
    """Templates that read lists of parts get them; the others get a text, as vLLM does."""
    name, theirs, ours = pair
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    as_text = [{"role": "user", "content": "one\ntwo"}]
    expected = theirs.apply_chat_template(parts if name == "parts" else as_text, tokenize=False)
    assert ours.render(parts, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"role": "user", "content": "a", "tool_calls": [{"function": {}}]}], [{"role": 1}]],
)
def test_what_a_template_cannot_render_is_the_clients_error(messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content + m.tool_calls[0].x.y }}{% endfor %}", {}, "here"
    )
    with pytest.raises(ApiError) as raised:
        template.render(messages)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_templates_are_sandboxed(attack: str) -> None:
    template = ChatTemplate(attack, {}, "here")
    with pytest.raises(ApiError) as raised:
        template.render([{"role": "user", "content": "x"}])
    assert raised.value.status == 400


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def rendered(file: str | None = None) -> str | None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        template = load_chat_template(folder, config, {}, file)
        return template and template.render([{"role": "user", "content": ""}])

    folder = write_model(tmp_path / "m", template=None)
    assert rendered() is None
    config = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert rendered() == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert rendered(str(tmp_path / "own.jinja")) == "own"
    with pytest.raises(ConfigError, match="--chat-template"):
        rendered(str(tmp_path / "absent.jinja"))
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="line 1"):
        rendered()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"rag": "r"}}))
    with pytest.raises(ConfigError, match="--chat-template"):
        rendered()
