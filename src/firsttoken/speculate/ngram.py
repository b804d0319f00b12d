"""Drafts from the sequence itself: what followed the last n tokens the last time they stood there.

Prompt look-up decoding (Saxena, 2023). It costs no forward pass and wins where answers repeat the prompt or
themselves: code, quotations, lists, tables.
"""

from __future__ import annotations

from firsttoken.engine.sequence import Sequence


class NgramDrafter:
    """An index of every n-gram of each live sequence, extended as tokens come: O(new tokens), not O(length)."""

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        """Longer matches are tried first: they are right more often."""
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n {min_n} and max_n {max_n} must satisfy 1 <= min_n <= max_n")
        self._sizes = range(max_n, min_n - 1, -1)
        self._indexes: dict[str, _Index] = {}

    def propose(self, seq: Sequence, count: int) -> list[int]:
        """At most `count` tokens that may follow the sequence's known ones; empty if nothing matches."""
        index = self._indexes.get(seq.request.request_id)
        if index is None:
            index = self._indexes[seq.request.request_id] = _Index()
        tokens = seq.token_ids
        index.extend(tokens, self._sizes)
        for n in self._sizes:
            if len(tokens) <= n:
                continue
            start = index.ends.get(tuple(tokens[-n:]))
            if start is not None:
                return self._continue(tokens, start, count)
        return []

    @staticmethod
    def _continue(tokens: list[int], start: int, count: int) -> list[int]:
        """tokens[start:start + count], running on into the draft itself where it reaches the end (a loop)."""
        draft: list[int] = []
        for i in range(start, start + count):
            draft.append(tokens[i] if i < len(tokens) else draft[i - len(tokens)])
        return draft

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq.request.request_id, None)


class _Index:
    """Where each n-gram last ended, the one at the very end left out (it would only find itself)."""

    __slots__ = ("done", "ends")

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], int] = {}
        self.done = 0
        """n-grams that end at or before this many tokens are in."""

    def extend(self, tokens: list[int], sizes: range) -> None:
        for end in range(self.done + 1, len(tokens)):
            for n in sizes:
                if end >= n:
                    self.ends[tuple(tokens[end - n : end])] = end
        self.done = max(self.done, len(tokens) - 1)
