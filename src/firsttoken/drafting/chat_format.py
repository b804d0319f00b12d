"""The chat template as token scripts: what stands before a user's text, between it and the answer, and after that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firsttoken.engine.config import ConfigError

_USER, _ANSWER, _AGAIN = "\ue000", "\ue001", "\ue002"
"""Private-use characters: no template or tokenizer gives them a meaning."""


@dataclass(frozen=True)
class ChatFormat:
    """Token ids. A turn ends where its model writes the first id of what comes next."""

    header: tuple[int, ...]
    """Before the first user text."""
    to_answer: tuple[int, ...]
    """Between a user's text and the answer."""
    to_user: tuple[int, ...]
    """Between an answer and the next user text."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatFormat:
        """Raises ConfigError if the model has no chat template or a template that drops what is said."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        turns = [
            {"role": role, "content": text}
            for role, text in (("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN))
        ]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # templates are programs: they raise what they like
            raise ConfigError(
                f"{folder}: the chat template can't be used ({error}): a draft is trained on the model's chats,"
                " give a chat model"
            ) from None
        if not all(mark in text for mark in (_USER, _ANSWER, _AGAIN)):
            raise ConfigError(f"{folder}: the chat template drops part of a conversation; give a chat model")
        header, rest = text.split(_USER)
        to_answer, rest = rest.split(_ANSWER)
        to_user = rest.split(_AGAIN)[0]
        parts = [
            tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (header, to_answer, to_user)
        ]
        if not all(parts):
            raise ConfigError(f"{folder}: the chat template has nothing around a turn; give a chat model")
        return cls(*parts)
