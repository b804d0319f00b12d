"""Log-probabilities in the two shapes of the OpenAI API, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from firsttoken.engine.request import TokenLogprobs
from firsttoken.server.text import Tokenizer

LOWEST = -9999.0
"""JSON has no -inf; clients of the API know this number for it."""


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    return {
        "content": [
            {
                **token(entry.token_id, entry.logprob),
                "top_logprobs": [token(i, value) for i, value in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None],
    first_id: int | None,
    tokenizer: Tokenizer,
    as_ids: bool,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a text completion, and the text offset after it.

    `entries` may begin with None: the prompt's first token, `first_id`, whose probability nothing determines.
    A token that is no whole character is named by its bytes (bytes:\\xe2\\x80), so that no two share a name.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else token_name(tokenizer.token_bytes(token_id))

    tokens: list[str] = []
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        token_id = entry.token_id if entry is not None else first_id
        assert token_id is not None
        tokens.append(name(token_id))
        offsets.append(offset)
        offset += len(tokenizer.token_bytes(token_id).decode("utf-8", "ignore"))
        if entry is None:
            values.append(None)
            top.append(None)
        else:
            values.append(max(entry.logprob, LOWEST))
            alternatives = {name(i): max(value, LOWEST) for i, value in entry.top}
            top.append(alternatives | {tokens[-1]: values[-1] or 0.0})
    logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
    return logprobs, offset


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per position token id → logprob, rank and text; null for the first."""
    return [None if entry is None else _by_id(entry, tokenizer) for entry in entries]


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)]
    if all(token_id != entry.token_id for token_id, _, _ in ranked):
        ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, value, rank in ranked
    }


def token_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
