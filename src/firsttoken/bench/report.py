"""The stages as one HTML file that works offline: no script, no font, no address; charts are plain SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files

from firsttoken.bench import metrics
from firsttoken.bench.client import Record
from firsttoken.bench.metrics import METRICS, Spread
from firsttoken.bench.stages import IDLE_SERVER_NOTE, Row, Stage, TrialResult
from firsttoken.bench.stages_run import StagesReport
from firsttoken.bench.table import texts_note
from firsttoken.models import model_name


def html(report: StagesReport) -> str:
    css = (files("firsttoken.bench") / "data" / "report.css").read_text(encoding="utf-8")
    body = "\n".join(
        part
        for section in (_head, _tables, _distributions, _timelines, _premises, _measured_on, _glossary)
        for part in section(report)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>The first token, stage by stage: {escape(model_name(report.plan.model))}</title>\n"
        f"<style>\n{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _users(concurrency: int) -> str:
    return "One user" if concurrency == 1 else f"{concurrency} users at once"


# -------------------------------------------------------------------- headline


def _head(report: StagesReport) -> Iterator[str]:
    yield f'<div class="eyebrow">firsttoken · {escape(model_name(report.plan.model))}</div>'
    yield "<h1>How long until the first word?</h1>"
    yield (
        '<p class="lead">The time to first token (TTFT) is how long a person looks at an empty answer after'
        " pressing Enter. Here the same server answers the same questions again and again, each time with one"
        " more of its optimisations switched on.</p>"
    )
    bad = [row for row in report.rows if row.invalid]
    if bad:
        text = "; ".join(f"stage {r.stage} ({_users(r.concurrency).lower()}): {r.invalid}" for r in bad)
        yield f'<div class="banner"><b>Some figures are invalid.</b> {escape(text)}</div>'
    doubts = sorted({row.untrusted for row in report.rows if row.untrusted})
    if doubts:
        yield f'<div class="banner"><b>No verdict for some rows.</b> {escape("; ".join(doubts))}</div>'
    cards = [card for concurrency in report.plan.concurrency for card in _card(report.rows, concurrency)]
    if cards:
        yield '<div class="cards">' + "".join(cards) + "</div>"
        yield (
            '<p class="small soft" style="margin-top:.9rem">Median time to first token with prefix cache and'
            " batching (stage 2), beside a server without either (stage 0).</p>"
        )


def _card(rows: list[Row], concurrency: int) -> Iterator[str]:
    found = {row.stage: row for row in rows if row.concurrency == concurrency and not row.invalid}
    first, last = found.get("0"), found.get("2")
    if not (first and last and first.ttft_p50 and last.ttft_p50):
        return
    before, after = first.ttft_p50.median, last.ttft_p50.median
    times = f"{before / after:.1f}× earlier" if after < before else f"{after / before:.1f}× later"
    rate = ""
    if first.rate and last.rate:
        rates = f"{first.rate.median:.0f} → {last.rate.median:.0f} tokens per second"
        rate = f'<div class="small soft num">{rates}</div>'
    yield (
        f'<div class="card"><div class="who">{_users(concurrency)}</div>'
        f'<div class="big num">{after:.0f}<small>ms</small></div>'
        f'<div class="was num">was {before:.0f} ms: <b>{times}</b></div>{rate}'
        f'<div class="meter"><i style="width:{min(100.0, 100 * after / before):.1f}%"></i></div></div>'
    )


# -------------------------------------------------------------------- the table


def _tables(report: StagesReport) -> Iterator[str]:
    yield "<h2>The stages</h2>"
    yield '<p class="soft">Each stage keeps what the one before it switched on.</p>'
    gpu = any("gpu_percent" in trial.counters for trial in report.trials)
    names = [
        "TTFT p50, ms",
        "p95, ms",
        "TPOT, ms",
        "tok/s",
        "GPU %" if gpu else "CPU %",
        "cache hits %",
        "accepted %",
    ]
    for concurrency in report.plan.concurrency:
        yield f"<h3>{_users(concurrency)}</h3>"
        yield '<div class="scroll"><table><thead><tr><th>stage</th>'
        yield "".join(f"<th>{name}</th>" for name in names) + "</tr></thead><tbody>"
        for row in report.rows:
            if row.concurrency == concurrency:
                yield _table_row(row)
        yield "</tbody></table></div>"
    plan = report.plan
    yield (
        f'<p class="small soft">Median ± MAD (median absolute deviation) of {plan.repeats} repeats, run'
        " in random"
        " order. TPOT is the time per further token; p95 is over the requests of all repeats together;"
        " “accepted”"
        " is the share of guessed tokens that the model confirmed; a dash means that there is no such"
        " value.</p>"
    )
    yield f'<div class="aside">{escape(IDLE_SERVER_NOTE)}</div>'
    yield "<dl>"
    for stage in report.stages:
        yield f"<dt>{_name(stage)}</dt><dd>{escape(stage.words)}</dd>"
    yield "</dl>"


def _table_row(row: Row) -> str:
    key = f"<td>{_name(row)}</td>"
    remark = row.invalid or row.untrusted or row.note
    css = " ".join(name for name, on in (("invalid", row.invalid), ("has-note", remark)) if on)
    if row.invalid:
        cells = '<td colspan="7"><b>INVALID</b></td>'
    else:
        p95 = "–" if row.ttft_p95 is None else f"{row.ttft_p95:.0f}"
        values = [_pm(row.ttft_p50, 1), p95, _pm(row.tpot, 1), _pm(row.rate, 1)]
        values += [_pm(row.utilisation, 0), _pm(row.hit_rate, 0), _pm(row.acceptance, 0)]
        cells = "".join(f'<td class="num">{value}</td>' for value in values)
    note = f'<tr class="note"><td colspan="8">{escape(remark)}</td></tr>' if remark else ""
    return f'<tr class="{css}">{key}{cells}</tr>{note}'


def _pm(value: Spread | None, digits: int) -> str:
    if value is None:
        return "–"
    if value.n == 1:  # one trial has no spread
        return f"{value.median:.{digits}f}"
    return f'{value.median:.{digits}f}<span class="pm">± {value.mad:.{digits}f}</span>'


# -------------------------------------------------------------------- distributions


def _distributions(report: StagesReport) -> Iterator[str]:
    times = [t for trial in report.trials for t in _ttfts([trial])]
    if not times:
        return
    axis = LogAxis(min(times), max(times))
    yield "<h2>Every first token</h2>"
    yield (
        '<p class="soft">Each dot is one request; the bar is the median of the table. The scale is logarithmic:'
        " equal steps"
        " to the left are equal factors. A median can hide a bad tail, dots cannot.</p>"
    )
    for concurrency in report.plan.concurrency:
        yield f"<h3>{_users(concurrency)}</h3>"
        for stage in report.stages:
            trials = [t for t in report.trials if (t.stage, t.concurrency) == (stage.key, concurrency)]
            cell = (stage.key, concurrency)
            row = next((r for r in report.rows if (r.stage, r.concurrency) == cell), None)
            if trials and row:
                yield _strip(stage, row, trials, axis)
        ticks = "".join(
            f'<text x="{axis.at(tick):.2f}%" y="12" text-anchor="middle">{_short_ms(tick)}</text>'
            for tick in axis.ticks
        )
        scale = f'<svg height="16" aria-hidden="true">{ticks}</svg>'
        yield f'<div class="plot axis"><div class="label"></div>{scale}<div class="value"></div></div>'


def _strip(stage: Stage, row: Row, trials: list[TrialResult], axis: LogAxis) -> str:
    times = _ttfts(trials)
    colour = "broken" if row.invalid else _colour(stage)
    grid = "".join(
        f'<line class="gridline" x1="{axis.at(t):.2f}%" x2="{axis.at(t):.2f}%" y1="0" y2="34"/>'
        for t in axis.ticks
    )
    dots = "".join(
        f'<circle class="dot {colour}" cx="{axis.at(t):.2f}%" cy="{17 + _sway(i):.1f}" r="4">'
        f"<title>{t:.1f} ms</title></circle>"
        for i, t in enumerate(times)
    )
    bar, value = "", "INVALID" if row.invalid else "–"
    if row.ttft_p50 and row.ttft_p95 is not None and not row.invalid:
        x = f"{axis.at(row.ttft_p50.median):.2f}%"
        bar = f'<line class="median {colour}" x1="{x}" x2="{x}" y1="4" y2="30"/>'
        value = f"<b>{row.ttft_p50.median:.0f}</b> ms · p95 {row.ttft_p95:.0f}"
    label = f"{escape(stage.key)} {escape(stage.title)}"
    described = f'role="img" aria-label="{label}: TTFT of {len(times)} requests"'
    return (
        f'<div class="plot"><div class="label">{_name(stage)}</div>'
        f'<svg height="34" {described}>{grid}{dots}{bar}</svg><div class="value num">{value}</div></div>'
    )


def _sway(index: int) -> float:
    """A fixed vertical offset in pixels, so that equal values do not hide each other."""
    return ((index * 7) % 11 - 5) * 1.6


def _ttfts(trials: Iterable[TrialResult]) -> list[float]:
    values = (metrics.ttft(record) for trial in trials for record in trial.records)
    return [value for value in values if value is not None]


def _name(stage: Stage | Row) -> str:
    key = stage.key if isinstance(stage, Stage) else stage.stage
    return f'<b class="key">{escape(key)}</b> {escape(stage.title)}'


def _colour(stage: Stage) -> str:
    if stage.speculation != "off":
        return "guess"
    return "after" if stage.cached else "before"


class LogAxis:
    """Milliseconds → percent of the width, on a logarithmic scale with ticks at 1, 2, 5 · 10ⁿ."""

    def __init__(self, low: float, high: float):
        self.low, self.high = math.log(max(low, 0.01) / 1.15), math.log(high * 1.15)
        steps = [m * 10.0**e for e in range(-2, 7) for m in (1, 2, 5)]
        self.ticks = [t for t in steps if self.low <= math.log(t) <= self.high]

    def at(self, value: float) -> float:
        return 100 * (math.log(max(value, 0.01)) - self.low) / (self.high - self.low)


def _short_ms(value: float) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


# -------------------------------------------------------------------- timelines


def _timelines(report: StagesReport) -> Iterator[str]:
    yield "<h2>Where the time goes</h2>"
    yield (
        '<p class="soft">One trial of each stage on a common time axis. Every line is a request: from'
        " the moment"
        " it was sent, through waiting and the computing of its prompt, to its last token.</p>"
    )
    yield (
        '<div class="legend"><span style="--c:var(--queue)">waiting for its turn</span>'
        '<span style="--c:var(--prefill)">its prompt is computed</span>'
        '<span style="--c:var(--decode)">its answer grows, a mark per chunk</span></div>'
    )
    busiest = max(report.plan.concurrency)
    for concurrency in sorted(report.plan.concurrency, reverse=True):
        lanes = "".join(_lanes(report, concurrency))
        if concurrency == busiest:
            yield f"<h3>{_users(concurrency)}</h3>{lanes}"
        else:
            yield f"<details><summary>{_users(concurrency)}</summary>{lanes}</details>"


def _lanes(report: StagesReport, concurrency: int) -> Iterator[str]:
    chosen = []
    for stage in report.stages:
        trials = [t for t in report.trials if (t.stage, t.concurrency) == (stage.key, concurrency)]
        if trials:
            chosen.append((stage, min(trials, key=lambda trial: trial.repeat)))
    span = max((trial.wall for _, trial in chosen), default=0.0)
    if span <= 0:
        return
    for stage, trial in chosen:
        yield _lane(stage, trial, span)
    step = _nice_step(span)
    marks = [step * i for i in range(int(span / step) + 1)]
    ticks = "".join(
        f'<text x="{100 * t / span:.2f}%" y="11" text-anchor="{"middle" if t else "start"}">{t:g} s</text>'
        for t in marks
    )
    axis = f'<svg height="14" aria-hidden="true">{ticks}</svg>'
    yield f'<div class="lane axis"><div class="label"></div>{axis}</div>'


def _lane(stage: Stage, trial: TrialResult, span: float) -> str:
    start = min((record.sent for record in trial.records), default=0.0)
    pitch = 9.0 if len(trial.records) <= 24 else max(2.0, 216 / len(trial.records))
    bars = "".join(
        _request_bar(record, start, span, i * pitch, pitch * 0.72)
        for i, record in enumerate(sorted(trial.records, key=lambda r: r.sent))
        if record.ok
    )
    label = f"{escape(stage.key)} {escape(stage.title)}"
    height = math.ceil(pitch * len(trial.records))
    return (
        f'<div class="lane"><div class="label">{_name(stage)}'
        f'<div class="small soft num">{trial.wall:.1f} s</div></div>'
        f'<svg height="{height}" role="img" aria-label="{label}: timeline of {len(trial.records)} requests">'
        f"{bars}</svg></div>"
    )


def _request_bar(record: Record, start: float, span: float, y: float, height: float) -> str:
    """Three segments and a mark per chunk. Queue and prefill are the server's; the rest of the time to the
    first token (network, HTTP, tokenising) counts as waiting."""
    sent = record.sent - start
    first, last = record.chunks[0][0], record.chunks[-1][0]
    prefill = min(record.server.get("prefill", 0.0), first)
    segments = (
        ("queue", sent, sent + first - prefill),
        ("prefill", sent + first - prefill, sent + first),
        ("decode", sent + first, sent + last),
    )

    def x(seconds: float) -> str:
        return f"{100 * seconds / span:.3f}%"

    bars = "".join(
        f'<rect class="{name}" x="{x(a)}" width="{x(b - a)}" y="{y:.1f}" height="{height:.1f}"/>'
        for name, a, b in segments
        if b > a
    )
    ticks = ""
    if height > 4:
        ticks = "".join(
            f'<line class="tick" x1="{x(sent + t)}" x2="{x(sent + t)}" y1="{y:.1f}" y2="{y + height:.1f}"/>'
            for t, _ in record.chunks
        )
    title = f"{record.name}: first token after {first * 1e3:.0f} ms, last after {last * 1e3:.0f} ms"
    return f"<g><title>{escape(title)}</title>{bars}{ticks}</g>"


def _nice_step(span: float) -> float:
    """A round tick distance that gives four to ten ticks."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if span / (step * power) <= 8)


# -------------------------------------------------------------------- premises, machine, glossary


def _premises(report: StagesReport) -> Iterator[str]:
    yield "<h2>Does each figure measure what it claims?</h2>"
    yield (
        '<p class="soft">Benchmarks mislead when a cache is warm that should be cold, or a feature is'
        " on that did"
        " nothing. So each trial has a cache namespace of its own, and each stage must prove its"
        " premise; a stage"
        " that cannot is marked INVALID, and its figures are not shown.</p>"
    )
    yield '<ul class="checks">'
    for stage in report.stages:
        trials = [trial for trial in report.trials if trial.stage == stage.key]
        broken = [trial for trial in trials if trial.invalid]
        mark, css = ("✗", "fail") if broken else ("✓", "")
        held = f"Held in {len(trials) - len(broken)} of {len(trials)} trials."
        why = f" <b>{escape(broken[0].invalid or '')}</b>" if broken else ""
        yield (
            f'<li class="{css}"><span class="mark">{mark}</span><div>{_name(stage)}<div class="small soft">'
            f"{escape(_premise_words(stage, report))} {held}{why}</div></div></li>"
        )
    worst = max((t.health.lag_p99 or 0.0 for t in report.trials), default=0.0)
    yield (
        '<li><span class="mark">✓</span><div>The measuring client was not in the way: its event loop'
        " was at most"
        f" {worst * 1e3:.1f} ms late (p99 of the worst trial).</div></li>"
        if not any(t.untrusted for t in report.trials)
        else '<li class="fail"><span class="mark">✗</span><div>The measuring client was in the way in'
        " some trials;"
        " there is no verdict for them.</div></li>"
    )
    yield f'</ul><p class="small soft">{escape(texts_note(report))}</p>'


def _premise_words(stage: Stage, report: StagesReport) -> str:
    least = report.premises.get("least_cached")
    words = ["Every answer complete"]
    words.append(
        f"at least {least} prompt tokens of every request from the cache"
        if stage.cached
        else "no prompt token from the cache"
    )
    words.append(
        "several answers growing at once when there are several users" if stage.batched else "one at a time"
    )
    if stage.speculation == "off":
        words.append("nothing guessed")
    elif stage.speculation == "always":
        words.append("tokens were guessed")
    else:
        words.append("guessed, or the server says why not")
    return ", ".join(words) + "."


def _measured_on(report: StagesReport) -> Iterator[str]:
    about, plan = report.machine, report.plan
    server = report.server
    rows = {
        "Machine": f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB,"
        f" {about['system']}",
        "GPU": ", ".join(about["gpus"]),
        "Model": f"{plan.model} ({server.get('dtype', 'dtype not said')} on {server.get('device', '?')})",
        "Versions": ", ".join(f"{name} {number}" for name, number in about["versions"].items()),
        "Requests": f"{plan.requests_words()} per trial, {plan.repeats} repeats, {plan.max_tokens}"
        " tokens each,"
        f" greedy, seed {plan.seed}",
        "Prompts": f"about {report.premises.get('shared_tokens')} shared tokens and a short turn: chat, code,"
        " creative, Chinese",
        "Date": f"{report.date}; {report.seconds:.0f} s"
        + (f"; {report.resumed} trials from an interrupted run" if report.resumed else ""),
    }
    yield "<h2>Measured on</h2><dl>"
    yield "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows.items() if text)
    yield f"</dl><p class='soft'>The command that made this page:</p><pre>{escape(report.command)}</pre>"


def _glossary(report: StagesReport) -> Iterator[str]:
    yield "<details><summary>What the words mean, exactly</summary><dl>"
    for metric in METRICS.values():
        meaning = f' <span class="soft">{escape(metric.meaning)}</span>' if metric.meaning else ""
        yield f"<dt>{escape(metric.label)} ({metric.unit})</dt><dd>{escape(metric.formula)}.{meaning}</dd>"
    yield "</dl></details>"
    yield "<footer>Made by firsttoken bench stages. This file is complete: it loads nothing.</footer>"
