"""Drafts from texts: the longest match wins, memory is bounded, and answers stay within their cache salt."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.engine.request import Request, SamplingParams
from firsttoken.engine.sequence import Sequence
from firsttoken.speculate.ngram import _GENERATION, _LONGEST, _PLACES, _SALTS, NgramDrafter, SuffixIndex

JUDGE = SimpleNamespace()


def sequence(tokens: list[int], prompt: int | None = None, salt: str | None = None) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=[], sampling=SamplingParams(), cache_salt=salt)
    return Sequence(
        request=request,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        noise_seed=0,
        arrival=0.0,
    )


def drafted(drafter: NgramDrafter, seq: Sequence, count: int) -> list[int]:
    (offered,) = drafter.offers([seq], [count])
    (draft,) = drafter.draft([seq], [count], JUDGE)
    assert len(draft) == offered
    return draft


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3))
def test_the_longest_suffix_is_found_wherever_the_text_was_cut(tokens, n):
    index = SuffixIndex(n)
    cut = len(tokens) // 3
    index.extend(tokens[:cut])
    index.extend(tokens[cut:])

    def common(end: int) -> int:
        length = 0
        while length < min(end, _LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]][-_PLACES:]
    length, start = index.longest(tokens)
    if not ends or len(tokens) < n:
        assert length == 0
    else:
        assert length == max(map(common, ends))
        assert start == max(e for e in ends if common(e) == length)


def test_the_longest_match_is_continued_and_a_loop_goes_on():
    drafter = NgramDrafter()
    assert drafted(drafter, sequence([1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3]), 3) == [4, 9, 2]
    assert drafted(NgramDrafter(), sequence([5, 6, 5, 6, 5, 6]), 5) == [5, 6, 5, 6, 5]
    assert drafted(NgramDrafter(), sequence([1, 2, 3]), 5) == []


def test_a_past_answer_is_found_within_its_salt_alone():
    drafter = NgramDrafter()
    answer = [7, 1, 8, 2, 9, 3, 10, 4]
    drafter.forget(sequence([20, 21, 22, 23, *answer], prompt=4, salt="a"))
    assert drafted(drafter, sequence([5, 20, 21, 22, 23], salt="a"), 4) == answer[:4]
    assert drafted(drafter, sequence([8, 2, 9, 3], salt="a"), 5) == [10, 4], "no further than its end"
    assert drafted(drafter, sequence([8, 2, 9, 3], salt="b"), 5) == []
    assert drafted(drafter, sequence([8, 2, 9, 3]), 5) == []


def test_past_answers_take_bounded_memory():
    drafter = NgramDrafter()
    for salt in range(_SALTS + 2):
        for start in range(5):
            tokens = [(salt + start * 4096 + i) % 30000 for i in range(_GENERATION // 2)]
            drafter.forget(sequence(tokens, prompt=1, salt=str(salt)))
    assert len(drafter._past) == _SALTS
    for past in drafter._past.values():
        assert len(past._young.tokens) + len(past._old.tokens) <= 2 * _GENERATION
