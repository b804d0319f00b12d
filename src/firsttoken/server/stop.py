"""Stop strings: found across token and step boundaries, and never partly shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text in, text out that can no longer turn out to be the beginning of a stop string.

    The match that counts is the first to be complete; of those that are complete at the same character, the
    longest. That depends on the text alone and not on how it was cut into pieces.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text goes to the end of the match instead of its beginning."""
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found. Nothing may be pushed after it."""

    def push(self, text: str) -> str:
        if not text:
            return ""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: end if self._include else start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not the whole of it."""
    last = text[-1]
    length = min(len(stop) - 1, len(text))
    while length > 0:
        # Only a beginning that ends in the text's last character can be one.
        length = stop.rfind(last, 0, length) + 1
        if length and text.endswith(stop[:length]):
            return length
        length -= 1
    return 0
