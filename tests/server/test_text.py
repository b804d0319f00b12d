"""The tokenizer in the HTTP process gives what transformers gives for the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from firsttoken.engine.config import ConfigError
from firsttoken.server import text as text_module
from firsttoken.server.text import Tokenizer

from .models import LINES, SPECIAL, byte_fallback_tokenizer, byte_level_tokenizer, write_model

TEXTS = [*LINES, "", " ", "<|im_start|>user\nhi<|im_end|>", "<think>two words</think>", "🙂 a\u0301"]


@pytest.mark.parametrize("kind", ["byte level", "byte level with BOS", "byte fallback"])
def test_same_ids_as_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    raw = byte_fallback_tokenizer() if kind == "byte fallback" else byte_level_tokenizer()
    if kind == "byte level with BOS":
        raw.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    folder = write_model(tmp_path / "m", raw)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        ids = ours.encode(text)
        assert ours.decode(ids, False) == theirs.decode(ids)
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_only_the_config_knows_are_added(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_model(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["pad_token"] = "<|padding|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    assert ours.encode("a<|padding|>b") == theirs.encode("a<|padding|>b")
    assert ours.special_tokens["pad_token"] == "<|padding|>"


pieces = st.sampled_from([*SPECIAL, "<think>", "two words", *LINES, " ", "\n"]) | st.text(max_size=40)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(pieces, max_size=12))
def test_cached_segments_change_nothing(model_folder: Path, parts: list[str]) -> None:
    tokenizer = _cached(model_folder)
    text = "".join(parts)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(text) == expected
    assert tokenizer.encode_chat(text) == expected  # and now from the cache


_tokenizers: dict[Path, Tokenizer] = {}


def _cached(folder: Path) -> Tokenizer:
    if folder not in _tokenizers:
        _tokenizers[folder] = Tokenizer(folder)
        assert _tokenizers[folder]._segments is not None
    return _tokenizers[folder]


def test_segment_cache_is_bounded(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "SEGMENT_CACHE_TOKENS", 2000)
    tokenizer = Tokenizer(model_folder)
    for i in range(100):
        text = f"number {i} and then some more words, to be long enough"
        assert tokenizer.encode_chat(text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer._segments is not None
    kept = sum(map(len, tokenizer._segments._known.values()))
    assert 0 < kept == tokenizer._segments._size <= 2000


def test_sentencepiece_kinds_have_no_segment_cache(tmp_path: Path) -> None:
    """They put a space before the first word of a text, so a segment's tokens depend on where it stands."""
    tokenizer = Tokenizer(write_model(tmp_path / "m", byte_fallback_tokenizer()))
    assert tokenizer._segments is None
    assert tokenizer.encode_chat("a</s>b") == tokenizer.encode("a</s>b", add_special_tokens=False)


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}'])
def test_a_folder_without_a_tokenizer_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as raised:
        Tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    raw = RawTokenizer.from_str(byte_level_tokenizer().to_str())
    raw.enable_truncation(max_length=5)
    tokenizer = Tokenizer(write_model(tmp_path / "m", raw))
    assert len(tokenizer.encode("a long text " * 20)) > 5
