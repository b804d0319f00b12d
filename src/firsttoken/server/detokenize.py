"""Tokens → text as they come: deltas that concatenate to exactly the decoding of the whole.

A token may end inside a character, so bytes are held back until they are a character, or can never become
one. How tokens become text is said by the `decoder` of a model's tokenizer.json; the two kinds that language
models use are followed here token by token, in constant time each. Any other is decoded anew at each step.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import tokenizers


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make certain, given all before them."""

    def finish(self) -> str:
        """What is still held back; the sequence ends here."""


class Vocabulary:
    """What each token stands for. Looked up once per token, then kept."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that part of tokenizer.json."""
        self._tokenizer = tokenizer
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._rules = _fallback_rules(decoder)
        self.byte_level = (decoder or {}).get("type") == "ByteLevel"

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        skip = self._special_ids if skip_special_tokens else set()
        if self.byte_level:
            return _ByteLevel(self.token_bytes, skip)
        if self._rules is not None:
            return _ByteFallback(self._tokenizer.id_to_token, self._rules, skip)
        return _Whole(self._tokenizer, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self.byte_level:
            # A piece with any character outside the byte alphabet (an added token) stands for itself.
            values = [_BYTE_OF.get(character) for character in piece]
            return piece.encode() if None in values else bytes(v for v in values if v is not None)
        if self._rules is not None:
            piece = self._rules.replace(piece)
            value = _byte_of_piece(piece)
            return piece.encode() if value is None else bytes([value])
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


class _ByteLevel:
    """Every token is bytes, the text is their UTF-8 (GPT-2's way: Llama 3, Qwen, SmolLM, Mistral's Tekken).

    Malformed bytes become U+FFFD, one for each longest prefix of a character that could not be completed
    (Unicode 3.9, best practice); Python's decoder and the tokenizers library agree on that.
    """

    __slots__ = ("_bytes_of", "_decode", "_skip")

    def __init__(self, bytes_of: Callable[[int], bytes], skip: set[int]) -> None:
        self._bytes_of = bytes_of
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join([self._bytes_of(i) for i in token_ids if i not in self._skip])
        return self._decode(data)

    def finish(self) -> str:
        return self._decode(b"", True)


class _FallbackRules:
    """SentencePiece's way (Llama 2, early Mistral): pieces with ▁ for a space, <0xE4> for single bytes."""

    def __init__(self, replacements: list[tuple[str, str]], strip: str, strip_count: int) -> None:
        self.replacements = replacements
        self.strip = strip
        self.strip_count = strip_count

    def replace(self, piece: str) -> str:
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return piece


class _ByteFallback:
    """Runs of byte tokens are text only as a whole: if a run is malformed, each of its bytes is U+FFFD.

    So a run is held back until a token that is no byte ends it. At the very start of the text up to
    `strip_count` characters `strip` (the space that SentencePiece puts before the first word) are dropped.
    """

    __slots__ = ("_piece_of", "_rules", "_run", "_skip", "_strip_left")

    def __init__(self, piece_of: Callable[[int], str | None], rules: _FallbackRules, skip: set[int]) -> None:
        self._piece_of = piece_of
        self._rules = rules
        self._skip = skip
        self._run = bytearray()
        self._strip_left = rules.strip_count

    def push(self, token_ids: Iterable[int]) -> str:
        texts = []
        for token_id in token_ids:
            if token_id in self._skip or (piece := self._piece_of(token_id)) is None:
                continue
            piece = self._rules.replace(piece)
            value = _byte_of_piece(piece)
            if value is not None:
                self._run.append(value)
                continue
            if self._run:
                texts.append(self._end_run())
            texts.append(piece)
        return self._stripped("".join(texts))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._rules.strip:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


class _Whole:
    """For any other decoder: decode everything, and give what is new and cannot change any more."""

    __slots__ = ("_ids", "_sent", "_skip_special_tokens", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._sent = ""

    def push(self, token_ids: Iterable[int]) -> str:
        self._ids.extend(token_ids)
        text = self._decoded().rstrip("\ufffd")
        if not text.startswith(self._sent):
            return ""
        delta = text[len(self._sent) :]
        self._sent = text
        return delta

    def finish(self) -> str:
        return self._decoded()[len(self._sent) :]

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, other bytes start at U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


def _byte_of_piece(piece: str) -> int | None:
    """The byte of a piece such as <0xE4>, None for any other piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece[5] == ">" and set(piece[3:5]) <= _HEX_DIGITS:
        return int(piece[3:5], 16)
    return None


def _fallback_rules(decoder: dict[str, Any] | None) -> _FallbackRules | None:
    """The rules of a Replace… ByteFallback Fuse [Strip] sequence; None for any other decoder."""
    if not decoder or decoder.get("type") != "Sequence":
        return None
    steps = list(decoder["decoders"])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteFallback", "Fuse"]:
        return _FallbackRules(replacements, "", 0)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return _FallbackRules(replacements, steps[2]["content"], steps[2]["start"])
    return None
