"""Stop strings against a definition that looks at whole texts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.server.stop import StopStrings

texts = st.text("ab·", max_size=30)
stops = st.lists(st.text("ab·", min_size=1, max_size=6), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the match that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return min(begins), end
    return None


@settings(max_examples=1000, deadline=None)
@given(text=texts, stops=stops, cuts=st.lists(st.integers(0, 4), max_size=30), include=st.booleans())
def test_any_text_in_any_pieces(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    match = first_match(text, stops)
    finder = StopStrings(stops, include)
    shown, at = "", 0
    for cut in [*cuts, len(text)]:
        piece = text[at : at + cut]
        at += cut
        shown += finder.push(piece)
        seen = text[:at]
        if finder.matched is not None:
            break
        # What is shown can't be taken back, and nothing is held that could not begin a stop string.
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        assert not any(
            stop.startswith(shown[i:] + held)
            for stop in stops
            for i in range(len(shown))
            if len(shown[i:] + held) < len(stop)
        )
    if match is None:
        assert finder.matched is None
        assert shown + finder.finish() == text
    else:
        begin, end = match
        assert finder.matched == text[begin:end]
        assert shown == text[: end if include else begin]


def test_longest_of_those_complete_at_the_same_character() -> None:
    finder = StopStrings(["END", "THE END"])
    assert finder.push("THE EN") == ""
    assert finder.push("D.") == ""
    assert finder.matched == "THE END"
