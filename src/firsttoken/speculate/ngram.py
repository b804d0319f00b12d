"""Drafts from texts: what followed the last tokens where they stood before, in the sequence itself or in past answers.

Prompt look-up (Saxena, 2023) and suffix decoding (Oliaro et al., 2024). It costs no forward pass and wins where
answers repeat their prompt, themselves or each other: code, quotations, lists, the same question again.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed
from firsttoken.speculate.drafter import Judge

_PLACES = 8
"""Newest places of each n-gram that are kept and compared."""
_LONGEST = 24
"""A match is not compared further back than this many tokens."""
_LEAST_PAST = 4
"""A match in another answer must be this long: they have less to do with the sequence than its own text."""
_GENERATION = 8192
"""Tokens of past answers after which the older half of them is forgotten."""
_SALTS = 8
"""Cache salts whose answers are remembered, those used last."""


class SuffixIndex:
    """A growing text and the newest places of each of its n-grams: finds where its longest suffixes stood before.

    O(1) per token added and O(1) per look-up: a look-up compares at most `_PLACES` places over `_LONGEST` tokens.
    """

    def __init__(self, n: int) -> None:
        """n: the shortest match."""
        self.tokens: list[int] = []
        self._n = n
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def extend(self, tokens: list[int]) -> None:
        text, n = self.tokens, self._n
        for token in tokens:
            # The n-gram that ends the text so far is known by what follows it; the last one would find itself.
            if len(text) >= n:
                self._ends.setdefault(tuple(text[-n:]), deque(maxlen=_PLACES)).append(len(text))
            text.append(token)

    def longest(self, suffix_of: list[int]) -> tuple[int, int]:
        """(length of the longest match found, where its continuation starts); (0, 0) without any. The newest of
        equally long ones."""
        best = (0, 0)
        for end in self._ends.get(tuple(suffix_of[-self._n :]), ()):
            length = self._n
            most = min(_LONGEST, end, len(suffix_of))
            while length < most and self.tokens[end - 1 - length] == suffix_of[-1 - length]:
                length += 1
            if length >= best[0]:
                best = (length, end)
        return best

    def following(self, start: int, count: int) -> list[int]:
        return self.tokens[start : start + count]


class _PastAnswers:
    """The answers of one cache salt, newest first: two generations, of which the older is dropped as a whole."""

    def __init__(self) -> None:
        self._young, self._old = SuffixIndex(_LEAST_PAST), SuffixIndex(_LEAST_PAST)

    def add(self, seq: Sequence) -> None:
        # With the end of the prompt, so that the start of an answer is found too.
        tokens = seq.token_ids[max(0, seq.num_prompt_tokens - _LONGEST) :][-_GENERATION:]
        if len(self._young.tokens) + len(tokens) > _GENERATION:
            self._young, self._old = SuffixIndex(_LEAST_PAST), self._young
        self._young.extend([*tokens, -1])  # no token: matches and drafts end there

    def best(self, tokens: list[int], count: int) -> tuple[int, list[int]]:
        """(length of the longest match, what followed it)"""
        found: tuple[int, list[int]] = (0, [])
        for text in (self._young, self._old):
            length, start = text.longest(tokens)
            if length > found[0]:
                draft = text.following(start, count)
                found = (length, draft[: draft.index(-1)] if -1 in draft else draft)
        return found


class NgramDrafter:
    """Implements `drafter.Drafter` without a model: offers what the longest match was followed by."""

    name = "ngram"
    capture: tuple[int, ...] = ()
    lookahead = 0
    step_share = 0.0

    def __init__(self, min_n: int = 2) -> None:
        """min_n: the shortest match within a sequence."""
        if min_n < 1:
            raise ValueError(f"min_n is {min_n}, the least is 1")
        self._min_n = min_n
        self._texts: dict[Sequence, SuffixIndex] = {}
        self._past: OrderedDict[str | None, _PastAnswers] = OrderedDict()
        self._offers: dict[Sequence, list[int]] = {}

    def offers(self, seqs: list[Sequence], rooms: list[int]) -> list[int]:
        self._offers = {
            seq: self._offer(seq, room) for seq, room in zip(seqs, rooms, strict=True) if room > 0
        }
        return [len(self._offers.get(seq, ())) for seq in seqs]

    def catch_up(self, seqs: list[Sequence]) -> None:
        """Nothing is ever behind: a look-up brings the index up to the known tokens."""

    def draft(self, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
        return [self._offers[seq][:count] for seq, count in zip(seqs, counts, strict=True)]

    def _offer(self, seq: Sequence, count: int) -> list[int]:
        tokens = seq.token_ids
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = SuffixIndex(self._min_n)
        text.extend(tokens[len(text.tokens) :])
        length, start = text.longest(tokens)
        past = self._past.get(seq.request.cache_salt)
        if past is not None:
            past_length, draft = past.best(tokens, count)
            if past_length > length and draft:
                return draft
        return self._repeat(tokens, start, count) if length else []

    @staticmethod
    def _repeat(tokens: list[int], start: int, count: int) -> list[int]:
        """tokens[start:start + count], running on into the draft itself where it reaches the end (a loop)."""
        draft: list[int] = []
        for i in range(start, start + count):
            draft.append(tokens[i] if i < len(tokens) else draft[i - len(tokens)])
        return draft

    def computed(self, items: list[Computed], *, work: bool) -> None:
        """Texts are read where they are needed."""

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)
        if not seq.request.speculate or not seq.num_output_tokens:
            return
        salt = seq.request.cache_salt
        self._past.setdefault(salt, _PastAnswers()).add(seq)
        self._past.move_to_end(salt)
        if len(self._past) > _SALTS:
            self._past.popitem(last=False)
