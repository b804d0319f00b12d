"""The results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from firsttoken.bench.goodput import GoodputReport
from firsttoken.bench.metrics import METRICS, Spread
from firsttoken.bench.stages import BF16_NOTE, IDLE_SERVER_NOTE, Row
from firsttoken.bench.stages_run import StagesReport

_WIDE = 104
"""Columns of a terminal that holds every figure with its spread; in a narrower one the medians stand alone."""


def stages(report: StagesReport, width: int = _WIDE) -> RenderableType:
    """width: of the terminal, in columns."""
    parts: list[RenderableType] = []
    compact = width < _WIDE
    for concurrency in report.plan.concurrency:
        rows = [row for row in report.rows if row.concurrency == concurrency]
        users = "1 user" if concurrency == 1 else f"{concurrency} users at once"
        parts += [Text(f"\n{users}", style="bold"), _table(rows, compact), *_remarks(rows)]
    parts.append(Text(""))
    if report.headline:
        parts.append(Text(f"Time to first token, p50. {report.headline}.", style="bold"))
    if compact:
        parts.append(Text("The spreads (MAD) are in the report, and here in a wider terminal.", style="dim"))
    parts += [Text(note, style="dim") for note in footnotes(report)]
    return Group(*parts)


def _table(rows: list[Row], compact: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "stage"):
        table.add_column(name, no_wrap=True)

    def show(value: Spread | None, digits: int) -> str:
        text = pm(value, digits)
        return text.split(" ")[0] if compact else text

    for name in ("TTFT p50", "p95", "TPOT", "tok/s", "busy", "cache hits", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("", "", "ms", "ms", "ms", "", "%", "%", "%", style="dim")
    for row in rows:
        if row.invalid:
            table.add_row(row.stage, row.title, "[bold red]INVALID[/]", *[""] * 6)
            continue
        p95 = "–" if row.ttft_p95 is None else f"{row.ttft_p95:.0f}"
        figures = [show(row.ttft_p50, 1), p95, show(row.tpot, 1), show(row.rate, 1)]
        figures += [show(row.utilisation, 0), show(row.hit_rate, 0), show(row.acceptance, 0)]
        table.add_row(row.stage, row.title, *figures, style="dim" if row.untrusted else "")
    return table


def pm(value: Spread | None, digits: int) -> str:
    """median ± MAD, of one trial its value alone, a dash for no value."""
    if value is None:
        return "–"
    return f"{value.median:.{digits}f}" + (f" ± {value.mad:.{digits}f}" if value.n > 1 else "")


def _remarks(rows: list[Row]) -> Iterator[RenderableType]:
    for row in rows:
        if row.invalid:
            yield Padding(Text(f"{row.stage} is INVALID: {row.invalid}", style="red"), (0, 0, 0, 2))
        elif row.untrusted:
            yield Padding(Text(f"{row.stage}: no verdict: {row.untrusted}", style="yellow"), (0, 0, 0, 2))
        if row.note:
            yield Padding(Text(f"{row.stage}: {row.note}", style="dim"), (0, 0, 0, 2))


def texts_note(report: StagesReport) -> str:
    """Whether the optimisations changed any text."""
    pairs = [row.same_texts for row in report.rows if row.same_texts]
    equal, compared = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if not compared:
        return "No texts could be compared with stage 0."
    note = f"{equal} of {compared} greedy texts are equal to those of stage 0."
    dtype = report.server.get("dtype")
    return note if equal == compared or dtype == "float32" else f"{note} {BF16_NOTE}"


def footnotes(report: StagesReport) -> list[str]:
    plan = report.plan
    about = (
        f"median ± MAD of {plan.repeats} repeats in random order; requests per trial: {plan.requests_words()};"
        f" each of {plan.max_tokens} tokens after about {report.premises.get('shared_tokens')} shared prompt"
        " tokens; p95 over all repeats together."
    )
    formulas = "; ".join(
        f"{name}: {METRICS[key].formula}"
        for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("busy", "utilisation"))
    )
    return [
        f"{about} {formulas}.",
        texts_note(report),
        IDLE_SERVER_NOTE,
    ]


def goodput(report: GoodputReport) -> RenderableType:
    kinds = [kind.name for kind in report.plan.kinds]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("order of admission")
    for name in ("goodput", "in time", *kinds, "TTFT p50", "p99", "longest wait", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("", "req/s", "%", *["%"] * len(kinds), "ms", "ms", "ms", "", style="dim")
    names = {"fcfs": "order of arrival (fcfs)", "deadline": "deadlines"}
    for row in report.rows:
        figures = [pm(row.goodput, 2), pm(row.share_met, 0)]
        figures += [pm(row.share_met_by_kind.get(kind), 0) for kind in kinds]
        figures += [pm(row.ttft_p50, 0), pm(row.ttft_p99, 0)]
        wait = "–" if row.longest_wait_ms is None else f"{row.longest_wait_ms:.0f}"
        table.add_row(names[row.policy], *figures, wait, str(row.failed))
    plan = report.plan
    ratio = "cannot be given: in order of arrival nothing came in time"
    if report.ratio:
        ratio = f"{report.ratio.median:.2f} ± {report.ratio.mad:.2f}"
    idle = ", ".join(f"{kind} {ms:.0f} ms" for kind, ms in report.idle_ttft_ms.items())
    parts: list[RenderableType] = [
        Text(
            f"\n{report.rate:.2f} requests/s arrive, {plan.overload:g} times the capacity of"
            f" {report.capacity:.2f}; limit for the first token: {report.slo_ms:.0f} ms",
            style="bold",
        ),
        table,
        Text(f"Goodput with deadlines over goodput in order of arrival: {ratio}", style="bold"),
        Text(
            f"median ± MAD of {plan.repeats} repeats of {report.requests} Poisson arrivals, the same under both"
            " orders, which take turns at random. In time: the first token within the limit, counted from the"
            f" intended arrival. First token on the idle server: {idle}.",
            style="dim",
        ),
    ]
    if report.untrusted:
        parts.append(Text(f"no verdict: {report.untrusted}", style="yellow"))
    return Group(*parts)
