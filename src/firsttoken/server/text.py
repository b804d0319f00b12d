"""A model's tokenizer in the HTTP process: the `tokenizers` library alone, without torch or transformers."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from firsttoken.engine.config import ConfigError
from firsttoken.server.detokenize import Detokenizer, Vocabulary

SEGMENT_CACHE_TOKENS = 1 << 20
"""Tokens that the segment cache keeps: 8 MiB of pointers; the ids themselves are small shared integers."""
_SHORTEST_CACHED = 32
"""Characters; below this, tokenising is as fast as a look-up."""


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that are read here; the vocabulary is skipped over."""

    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class Tokenizer:
    """Text ↔ token ids as transformers does it for the same folder.

    Thread-safe: long prompts are tokenised off the event loop (the library releases the GIL).
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
            file = msgspec.json.decode(data, type=_TokenizerFile)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} has no tokenizer.json: MODEL must be a complete model folder"
            ) from None
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        self.config = read_json(folder / "tokenizer_config.json")
        self.special_tokens = _special_tokens(self.config)
        """bos_token, eos_token … as text; chat templates refer to them by these names."""
        self._add_missing_tokens()

        self.vocabulary = Vocabulary(self._tokenizer, file.decoder)
        self._segments = _SegmentCache(self._tokenizer) if _is_context_free(file) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of plain text, with BOS and EOS where this model wants them."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of a rendered chat template, which holds its special tokens already."""
        if self._segments is None:
            return self.encode(text, add_special_tokens=False)
        return self._segments.encode(text)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return self.vocabulary.detokenizer(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)

    def token_piece(self, token_id: int) -> str:
        """The token as it stands in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _add_missing_tokens(self) -> None:
        """Tokens that only tokenizer_config.json knows are added, as transformers does.

        BOS and EOS around a prompt are the post-processor's in tokenizer.json: `add_bos_token` does not count
        where that file exists.
        """
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        declared = self.config.get("added_tokens_decoder") or {}
        missing = [
            tokenizers.AddedToken(
                token["content"],
                **{
                    k: token.get(k, False)
                    for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
                },
            )
            for _, token in sorted(declared.items(), key=lambda item: int(item[0]))
            if token["content"] not in known
        ]
        known.update(token.content for token in missing)
        missing += [
            tokenizers.AddedToken(text, special=True)
            for text in dict.fromkeys(self.special_tokens.values())
            if text not in known
        ]
        if missing:
            self._tokenizer.add_tokens(missing)


class _SegmentCache:
    """Token ids of the texts between special tokens, so that a chat's known turns are not tokenised again.

    Exact where nothing crosses the border of an added token and a segment's tokens do not depend on what
    stands before it: then tokenizers too splits at the added tokens first and takes each segment by itself.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = [
            token
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and not (token.single_word or token.lstrip or token.rstrip or token.normalized)
        ]
        longest_first = sorted((re.escape(token.content) for token in added), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(longest_first) + ")").split if added else None
        self._ids_of_added = {token.content: [_id_of(tokenizer, token.content)] for token in added}
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        segments = self._split(text) if self._split else [text]
        ids: list[int] = []
        for segment in segments:
            if segment:
                ids += self._ids_of_added.get(segment) or self._encode_segment(segment)
        return ids

    def _encode_segment(self, segment: str) -> list[int]:
        with self._lock:
            known = self._known.get(segment)
            if known is not None:
                self._known.move_to_end(segment)
                return known
        ids: list[int] = self._tokenizer.encode_batch_fast([segment], add_special_tokens=False)[0].ids
        if len(segment) >= _SHORTEST_CACHED and len(ids) < SEGMENT_CACHE_TOKENS // 8:
            self._keep(segment, ids)
        return ids

    def _keep(self, segment: str, ids: list[int]) -> None:
        with self._lock:
            if segment in self._known:
                return
            self._known[segment] = ids
            self._size += len(ids)
            while self._size > SEGMENT_CACHE_TOKENS:
                _, oldest = self._known.popitem(last=False)
                self._size -= len(oldest)


def _id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no such file. Raises ConfigError if it isn't one."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _is_context_free(file: _TokenizerFile) -> bool:
    """Whether a segment's tokens are the same wherever it stands: byte-level, no space put before the first."""
    if file.normalizer is not None and file.normalizer["type"] not in ("NFC", "NFKC", "NFD", "NFKD"):
        return False
    step = file.pre_tokenizer or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    kinds = {step.get("type") for step in steps}
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        bool(byte_level)
        and kinds <= {"ByteLevel", "Split", "Digits"}
        and not any(step.get("add_prefix_space") for step in byte_level)
    )
