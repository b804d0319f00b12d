"""Why a request body cannot be read, naming the parameter at fault where the JSON has one.

What a strict decoder refuses is often well-formed to the client that wrote it: Python's json writes half of a
surrogate pair as \\ud83d (text that was cut inside an emoji) and NaN as a word. Python's own lenient decoder reads
such a body once more, on the way to the error alone, to say where it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from firsttoken.server.errors import ApiError, bad_request

_LARGEST_BODY = 1 << 20
"""Bytes. Larger ones are not read again: meanwhile other streams would stand still."""
_LONGEST_INTEGER = 32
"""Digits. The strict decoder takes more; anything longer is out of every parameter's range."""


class _NoNumber:
    """Stands where the body has a number that JSON or a double cannot hold."""


def unreadable(body: bytes, reason: str) -> ApiError:
    """The 400 for a body that the strict decoder refused for `reason`."""
    content = None
    with suppress(ValueError, RecursionError):
        if len(body) <= _LARGEST_BODY:
            content = json.loads(body, parse_int=_integer, parse_float=_number, parse_constant=_constant)
    if isinstance(content, dict):
        for name, value in content.items():
            fault = _fault(name) or next(filter(None, map(_fault, _leaves(value))), None)
            if fault is not None:
                shown = name.encode("utf-8", "backslashreplace").decode()[:64]
                return bad_request(f"{shown}: {fault}.", shown, "invalid_value")
    return bad_request(f"The body is not valid JSON: {reason}.")


def _integer(digits: str) -> int | type[_NoNumber]:
    return int(digits) if len(digits) <= _LONGEST_INTEGER else _NoNumber


def _number(digits: str) -> float | type[_NoNumber]:
    value = float(digits)
    return _NoNumber if value in (float("inf"), float("-inf")) else value


def _constant(_: str) -> type[_NoNumber]:
    return _NoNumber


def _leaves(value: Any) -> Iterator[Any]:
    """Every key, text and number in a value of any depth."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from value
            left += value.values()
        elif isinstance(value, list):
            left += value
        else:
            yield value


def _fault(leaf: Any) -> str | None:
    if leaf is _NoNumber:
        return "a number is out of range, or none (NaN, Infinity)"
    if isinstance(leaf, str) and not _is_unicode(leaf):
        return "a text has half of a surrogate pair (\\ud800 to \\udfff), which stands for no character"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
