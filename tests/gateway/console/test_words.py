"""The dictionaries agree with each other and with the code; figures read as people write them."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest

from firsttoken.gateway.console import figures, language
from firsttoken.gateway.console.language import FOLDER, LANGUAGES, Text, choose, words

CODE = "\n".join(path.read_text("utf-8") for path in sorted(Path(language.__file__).parent.rglob("*.py")))


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name is not None}


def test_there_is_a_file_per_language() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(LANGUAGES)


@pytest.mark.parametrize("other", sorted(set(LANGUAGES) - {"en"}))
def test_languages_have_the_same_words_with_the_same_gaps(other: str) -> None:
    english, translated = words("en"), words(other)
    assert english.keys() == translated.keys()
    for key, text in english.items():
        assert fields(text) == fields(translated[key]), key
        assert translated[key].strip()


def test_every_word_is_used_and_every_used_word_exists() -> None:
    known = words("en")
    used = set(re.findall(r'text\(\s*"([a-z_]+\.[\w-]+)"', CODE))
    assert used <= known.keys()
    # Put together from parts, as f"status.{name}"; or one of two, as "plans.edit" if … else "plans.create".
    families = tuple(set(re.findall(r'f"([a-z_]+\.)\{', CODE)))
    quoted = set(re.findall(r'"([a-z_]+\.[\w-]+)"', CODE))
    of_every_page = {
        f"{page}.{what}" for page in ("keys", "models", "requests", "chat") for what in ("nav", "title")
    }
    unused = {key for key in known.keys() - quoted - of_every_page if not key.startswith(families)}
    assert unused == set()


@pytest.mark.parametrize(
    ("wanted", "accepted", "expected"),
    [
        (None, "", "en"),
        (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        (None, "fr,en;q=0.5,zh;q=0.7", "zh"),
        (None, "fr, de;q=x, *;q=0.1", "en"),
        ("en", "zh", "en"),
        ("../secret", "zh", "zh"),
    ],
)
def test_the_language_is_the_chosen_or_the_browsers(wanted: str | None, accepted: str, expected: str) -> None:
    assert choose(wanted, accepted) == expected


def test_values_are_filled_in_as_they_are() -> None:
    assert Text("en")("keys.made", name="{braces}") == "Key “{braces}”"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0.421, "0.42 ms"),
        (7.31, "7.3 ms"),
        (84.4, "84 ms"),
        (999.4, "999 ms"),
        (1240, "1.24 s"),
        (75_200, "75 s"),
    ],
)
def test_milliseconds(value: float | None, expected: str) -> None:
    assert figures.milliseconds(value) == expected


def test_other_figures() -> None:
    assert [figures.count(value) for value in (None, 0, 12_340, 1_200_000)] == ["–", "0", "12,340", "1.2 M"]
    assert [figures.share(*pair) for pair in ((0, 0), (0, 9), (1, 200), (1, 2))] == [
        "–",
        "0 %",
        "0.5 %",
        "50 %",
    ]
    assert [figures.rate(value) for value in (None, 0, 0.42, 7.31, 1234.4)] == [
        "–",
        "0",
        "0.42",
        "7.3",
        "1,234",
    ]
    assert [figures.money(value) for value in (0, 5_000, 1_234_000_000)] == ["–", "0.0000", "1.23"]
