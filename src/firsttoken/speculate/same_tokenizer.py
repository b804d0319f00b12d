"""Whether a draft and a model mean the same tokens by the same ids. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json


def token_ids(file: Path) -> dict[str, int]:
    """Every token's id by a tokenizer.json, the added ones included."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        vocab = raw["model"]["vocab"]
        tokens = dict(vocab) if isinstance(vocab, dict) else {t[0]: i for i, t in enumerate(vocab)}
        tokens.update({t["content"]: t["id"] for t in raw.get("added_tokens") or []})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} can't be read as a tokenizer ({error}): fetch it again") from None
    return tokens


def first_difference(model: dict[str, int], draft: dict[str, int]) -> str | None:
    """The first token whose ids differ, in words; None if there is none."""
    # By the model's ids, then by the draft's: the answer must not depend on the order of a set.
    for token in sorted({*model, *draft}, key=lambda t: (model.get(t, 1 << 60), draft.get(t, 1 << 60), t)):
        if model.get(token) != draft.get(token):
            ours, theirs = (
                "missing" if ids.get(token) is None else f"id {ids[token]}" for ids in (model, draft)
            )
            return f"token {token!r} is {ours} in the model and {theirs} in the draft"
    return None


def check_same_tokenizer(model: Path, draft: Path) -> None:
    """Raises ConfigError if a draft's ids mean other tokens than the model's."""
    ours, theirs = model / "tokenizer.json", draft / "tokenizer.json"
    if ours.is_file() and theirs.is_file():
        if ours.read_bytes() == theirs.read_bytes():
            return
        if difference := first_difference(token_ids(ours), token_ids(theirs)):
            raise ConfigError(
                f"--draft {draft}: {difference}; use a draft with the model's own tokenizer, or --draft ngram"
            )
        return
    a, b = (read_json(folder, "config.json").get("vocab_size") for folder in (model, draft))
    if a != b:
        raise ConfigError(
            f"--draft {draft}: without a tokenizer.json to compare, its vocabulary of {b} must be the model's of {a};"
            " copy the draft's tokenizer.json into its folder, or use --draft ngram"
        )
