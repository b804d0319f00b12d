"""Deltas concatenate to the decoding of the whole, whatever the tokens and however they come in steps."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from firsttoken.server.detokenize import Vocabulary

from .models import byte_fallback_tokenizer, byte_level_tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A decoder that is not followed token by token."""
    tokenizer = byte_fallback_tokenizer()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "metaspace": metaspace_tokenizer(),
}


def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, json.loads(tokenizer.to_str())["decoder"])


VOCABULARIES = {name: vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}
SIZE = min(tokenizer.get_vocab_size() for tokenizer in TOKENIZERS.values())
steps = st.lists(st.lists(st.integers(0, SIZE + 5), max_size=6), max_size=12)
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def streamed(kind: str, steps: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = VOCABULARIES[kind].detokenizer(skip_special_tokens)
    return [*(detokenizer.push(step) for step in steps), detokenizer.finish()]


@kinds
@settings(max_examples=400, deadline=None)
@given(steps=steps, skip=st.booleans())
def test_any_tokens_in_any_steps(kind: str, steps: list[list[int]], skip: bool) -> None:
    whole = [token for step in steps for token in step]
    expected = TOKENIZERS[kind].decode(whole, skip_special_tokens=skip)
    assert "".join(streamed(kind, steps, skip)) == expected


@kinds
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 5), max_size=60))
def test_text_is_never_shown_with_a_replacement_character(kind: str, text: str, cuts: list[int]) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    parts, at = [], 0
    for cut in cuts:
        parts.append(ids[at : at + cut])
        at += cut
    parts.append(ids[at:])
    deltas = streamed(kind, parts)
    whole = TOKENIZERS[kind].decode(ids)
    assert "".join(deltas) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize("text", ["天气很好", "🙂👩‍👩‍👧 family", "नमस्ते", "a\u0301 é 𝔘"])
def test_characters_come_as_soon_as_they_are_whole(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text) / 2  # some characters take several tokens
    deltas = streamed(kind, [[token] for token in ids])
    assert "".join(deltas) == text
    if kind == "byte level":
        data = b""
        for token, delta in zip(ids, deltas, strict=False):
            data += VOCABULARIES[kind].token_bytes(token)
            shown = data.decode("utf-8", "ignore")
            assert shown.endswith(delta)
            assert "".join(deltas).startswith(shown)


def test_a_malformed_end_is_shown_as_the_whole_decoding_shows_it() -> None:
    ids = TOKENIZERS["byte level"].encode("好", add_special_tokens=False).ids[:-1]
    assert streamed("byte level", [ids]) == ["", TOKENIZERS["byte level"].decode(ids)]


def test_constant_work_per_token() -> None:
    """A malformed run of any length is not looked at again with every token."""
    broken = TOKENIZERS["byte level"].token_to_id("Ģ")  # the byte 0x80 alone is never a character
    deltas = streamed("byte level", [[broken]] * 2000)
    assert "".join(deltas) == "\ufffd" * 2000
    assert max(map(len, deltas)) <= 2


def test_bytes_of_tokens() -> None:
    for kind, tokenizer in TOKENIZERS.items():
        ids = tokenizer.encode("Numbers: 1024 🙂", add_special_tokens=False).ids
        data = b"".join(map(VOCABULARIES[kind].token_bytes, ids))
        if kind != "metaspace":
            assert data.strip() == "Numbers: 1024 🙂".encode()
    assert VOCABULARIES["byte level"].token_bytes(10**6) == b""
