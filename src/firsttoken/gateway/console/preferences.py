"""How one browser wants the console: language and theme, in two cookies that the page's own buttons write."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from firsttoken.gateway.console import language
from firsttoken.gateway.console.guard import cookie, header

THEMES = ("auto", "light", "dark")


@dataclass(frozen=True, slots=True)
class Preferences:
    language: str
    theme: str

    @classmethod
    def of(cls, request: Request) -> Preferences:
        wanted = cookie(request.scope, "firsttoken-language")
        theme = cookie(request.scope, "firsttoken-theme")
        return cls(
            language=language.choose(wanted, header(request.scope, b"accept-language")),
            theme=theme if theme in THEMES else "auto",
        )
