"""Chat templates: the Jinja dialect of Hugging Face model folders, rendered without transformers."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from firsttoken.engine.config import ConfigError
from firsttoken.server.errors import bad_request

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue. The trailing space shows whether the template keeps spaces."""


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, Any], origin: str) -> None:
        """`origin` says where the template is from. Raises ConfigError if it is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template in {origin} has an error in line {error.lineno}: {error}"
            ) from None
        self.source = source
        self._special_tokens = special_tokens
        self._takes_parts = self._renders_text_parts()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Contents that are lists of text parts stay lists if the template reads such,
        else they are joined by newlines. Raises ApiError 400 for messages that the template refuses."""
        messages = [self._message(message) for message in messages]
        if continue_final_message:
            return self._continued(messages, kwargs)
        return self._rendered(messages, add_generation_prompt, kwargs)

    def _rendered(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any] | None
    ) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(kwargs or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise bad_request(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from None
        except Exception as error:  # a template is a program: a message it did not expect fails in any way
            raise bad_request(
                f"The model's chat template cannot render these messages: {type(error).__name__}: {error}",
                "messages",
            ) from None

    def _continued(self, messages: list[dict[str, Any]], kwargs: dict[str, Any] | None) -> str:
        """Renders up to the end of the last message's text, without whatever closes the message."""
        last = dict(messages[-1])
        content = last.get("content")
        if isinstance(content, list) and content:
            content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]
        elif isinstance(content, str):
            content += _CONTINUE_MARK
        else:
            raise bad_request(
                "continue_final_message needs a last message with content.", "continue_final_message"
            )
        text = self._rendered([*messages[:-1], {**last, "content": content}], False, kwargs)
        at = text.rfind(_CONTINUE_MARK.strip())
        if at < 0:
            raise bad_request(
                "The model's chat template drops the last message: it cannot be continued.",
                "continue_final_message",
            )
        return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list) and not self._takes_parts:
            message = {**message, "content": "\n".join(part["text"] for part in content)}
        reasoning = next(
            (message[k] for k in ("reasoning_content", "thinking", "reasoning") if message.get(k)), None
        )
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        return {key: value for key, value in message.items() if value is not None}

    def _renders_text_parts(self) -> bool:
        """Whether the template itself goes through a list of text parts: found out by trying."""
        probe = [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
        ]
        variables = {**self._special_tokens, "messages": probe, "add_generation_prompt": True}
        try:
            text = self._template.render({"tools": None, "documents": None, **variables})
        except Exception:
            return False
        return "one" in text and "two" in text and "'type'" not in text and '"type"' not in text


def load_chat_template(
    folder: Path, tokenizer_config: dict[str, Any], special_tokens: dict[str, Any], file: str | None
) -> ChatTemplate | None:
    """The template of `--chat-template`, else of the model's folder; None if it has none.

    Of a folder's several named templates the one called default is taken. Where a template is both in a file
    of its own and in tokenizer_config.json the file wins, as in transformers.
    """
    if file is not None:
        try:
            return ChatTemplate(Path(file).read_text("utf-8"), special_tokens, f"--chat-template {file}")
        except OSError as error:
            raise ConfigError(f"--chat-template {file} cannot be read: {error.strerror}") from None
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text("utf-8"), special_tokens, str(path))
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, dict):
        if "default" not in source:
            raise ConfigError(
                f"{folder} has the chat templates {', '.join(source)} and none called default:"
                " choose one with --chat-template FILE"
            )
        source = source["default"]
    if source is None:
        return None
    return ChatTemplate(source, special_tokens, str(folder / "tokenizer_config.json"))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` in templates: callable, and without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment
