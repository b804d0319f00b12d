"""The three lists of parameters: disjoint, checked, and documented as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from firsttoken.server.errors import ApiError
from firsttoken.server.schemas import ACCEPTED, REFUSED, ChatRequest, CompletionRequest, validate

DOCS = Path(__file__).parents[2] / "docs"
MINIMAL: dict[type, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
}
kinds = pytest.mark.parametrize("kind", MINIMAL)


def test_the_page_is_what_the_tables_say() -> None:
    page = runpy.run_path(str(DOCS / "make_api_parameters.py"))["page"]()
    assert (DOCS / "api-parameters.md").read_text("utf-8") == page, "run python docs/make_api_parameters.py"


@kinds
def test_the_lists_are_disjoint(kind: type) -> None:
    honoured = set(kind.__struct_fields__)
    assert not honoured & set(ACCEPTED)
    assert not honoured & set(REFUSED)
    assert not set(ACCEPTED) & set(REFUSED)


@kinds
def test_null_is_neutral_for_everything(kind: type) -> None:
    names = {*kind.__struct_fields__, *ACCEPTED, *REFUSED} - MINIMAL[kind].keys()
    assert validate(MINIMAL[kind] | dict.fromkeys(names), kind) == validate(MINIMAL[kind], kind)


@kinds
@pytest.mark.parametrize("name", REFUSED)
def test_refused_unless_neutral(kind: type, name: str) -> None:
    for value in REFUSED[name][0]:
        validate(MINIMAL[kind] | {name: value}, kind)
    with pytest.raises(ApiError) as raised:
        validate(MINIMAL[kind] | {name: "something else"}, kind)
    assert (raised.value.status, raised.value.param) == (400, name)


@kinds
@pytest.mark.parametrize("name", sorted(set(ACCEPTED) - {"store"}))
def test_accepted_without_effect(kind: type, name: str) -> None:
    assert validate(MINIMAL[kind] | {name: "anything"}, kind) == validate(MINIMAL[kind], kind)
