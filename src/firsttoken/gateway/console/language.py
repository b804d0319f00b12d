"""The words of the console, a dictionary file per language in `languages/`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("languages")
LANGUAGES = {"en": "English", "zh": "中文"}
DEFAULT = "en"


def words(language: str) -> dict[str, str]:
    """Section.name → words."""
    content = tomllib.loads((FOLDER / f"{language}.toml").read_text("utf-8"))
    return {f"{section}.{name}": value for section, part in content.items() for name, value in part.items()}


# Read with the code that uses them: an upgrade under a running console must not mix the two.
WORDS = {language: words(language) for language in LANGUAGES}


class Text:
    """`text("keys.create")`; names in braces are filled in: `text("keys.revoke_question", name=…)`."""

    def __init__(self, language: str):
        self.language = language
        self.words = WORDS[language]

    def __call__(self, key: str, **values: Any) -> str:
        return self.words[key].format(**values)


def choose(wanted: str | None, accepted: str) -> str:
    """The language chosen before, else the first that the browser's Accept-Language names and we have."""
    if wanted in LANGUAGES:
        return wanted
    ranked: list[tuple[float, str]] = []
    for part in accepted.split(","):
        name, _, quality = part.partition(";")
        try:
            rank = float(quality.partition("=")[2] or 1)
        except ValueError:
            continue
        ranked.append((-rank, name.strip().lower().split("-")[0]))
    return next((name for _, name in sorted(ranked, key=lambda one: one[0]) if name in LANGUAGES), DEFAULT)
