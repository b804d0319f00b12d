"""The HTML report and the terminal's table, from a real run against the mock server."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from firsttoken.bench import prompts, table
from firsttoken.bench.client import Client
from firsttoken.bench.report import LogAxis, html
from firsttoken.bench.stages import summarise
from firsttoken.bench.stages_run import Journal, Plan, StagesReport, run_stages
from firsttoken.bench.stamped_http import Http

PLAN = Plan(model="a<b>&c", concurrency=(1, 2), repeats=1, prompts=2, max_tokens=4)


async def measured(url: str, folder: Path) -> StagesReport:
    async with Http(url, timeout=30) as http:
        return await run_stages(Client(http, "mock"), PLAN, prompts.load(), Journal(folder / "j"))


MEASURED: list[bytes] = []
"""One run serves all tests here, as the JSON that each reads into a report of its own."""


@pytest.fixture
async def report(mock: Callable[..., str], tmp_path: Path) -> StagesReport:
    if not MEASURED:
        MEASURED.append((await measured(mock("--itl", "40ms"), tmp_path)).json())
    return msgspec.json.decode(MEASURED[0], type=StagesReport)


class Balance(HTMLParser):
    """Fails on a tag that is not closed in order."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"


def test_the_page_is_whole_and_loads_nothing(report: StagesReport) -> None:
    page = html(report)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.seen)
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", page)
    assert "<b>&c" not in page
    assert "a&lt;b&gt;&amp;c" in page


def test_the_page_shows_every_request(report: StagesReport) -> None:
    page = html(report)
    requests = sum(len(trial.records) for trial in report.trials)
    assert page.count("<circle") == requests
    assert page.count("first token after") == requests
    for stage in report.stages:
        assert stage.words in page
    assert "Speculation cannot lower the first-token time of an idle server" in page
    assert "no effect expected" in page


def test_invalid_figures_are_not_shown(report: StagesReport) -> None:
    for trial in report.trials:
        if trial.stage == "1":
            trial.invalid = "the <cache> was off"
    report.rows = summarise(report.stages, report.trials)
    page = html(report)
    assert page.count("<b>INVALID</b>") == 2
    assert "the &lt;cache&gt; was off" in page
    console = Console(width=140, record=True)
    console.print(table.stages(report))
    text = console.export_text()
    assert text.count("INVALID") >= 4  # a cell and a line for each concurrency
    assert "1 is INVALID: the <cache> was off" in text


def test_a_distrusted_client_is_said(report: StagesReport) -> None:
    report.trials[0].untrusted = "the client is the bottleneck: x"
    report.rows = summarise(report.stages, report.trials)
    assert "the client is the bottleneck: x" in html(report)


def test_the_table(report: StagesReport) -> None:
    console = Console(width=140, record=True)
    console.print(table.stages(report))
    text = console.export_text()
    for words in ("1 user", "2 users at once", "+ prefix cache", "TTFT p50", "greedy texts are equal"):
        assert words in text


def test_json_holds_every_chunk_and_reads_back(report: StagesReport) -> None:
    again = msgspec.json.decode(report.json(), type=StagesReport)
    assert again == report
    raw = msgspec.json.decode(report.json())
    assert all(len(r["chunks"]) >= 2 for trial in raw["trials"] for r in trial["records"])
    assert {"machine", "command", "date", "plan", "rows", "server"} <= raw.keys()


def test_differing_texts_are_reported(report: StagesReport) -> None:
    for trial in report.trials:
        if trial.stage == "2":
            trial.records[0].chunks[0] = (trial.records[0].chunks[0][0], "another ")
    report.rows = summarise(report.stages, report.trials)
    report.server["dtype"] = "bfloat16"
    note = table.texts_note(report)
    assert "In bfloat16" in note
    report.server["dtype"] = "float32"
    assert "In bfloat16" not in table.texts_note(report)
    assert not table.texts_note(report).startswith("30 of 30")


def test_an_empty_report_is_still_a_page(report: StagesReport) -> None:
    empty = replace(report, trials=[], rows=[])
    parser = Balance()
    parser.feed(html(empty))
    assert parser.open == []


def test_log_axis() -> None:
    axis = LogAxis(30.0, 2000.0)
    assert axis.ticks == [50, 100, 200, 500, 1000, 2000]
    assert axis.at(100) - axis.at(50) == pytest.approx(axis.at(1000) - axis.at(500))
    assert 0 < axis.at(30) < axis.at(2000) < 100
