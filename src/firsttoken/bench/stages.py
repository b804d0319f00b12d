"""The stages of the proof: what each switches on, what must hold for its figures to count, and its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from firsttoken.bench import metrics
from firsttoken.bench.client import ClientHealth, Record
from firsttoken.bench.load import Trial

IDLE_SERVER_NOTE = (
    "Speculation cannot lower the first-token time of an idle server: the first token comes out of the"
    " prompt's own computation, before anything is drafted. It can only shorten the stream that follows."
)
BF16_NOTE = (
    "In bfloat16 two ways to compute the same prompt (cached or not, batched or not) may round differently,"
    " and a greedy text may then take another turn. To compare without that, add: -- --dtype float32"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the proof. `settings` are run-time settings of the engine, and all that differs."""

    key: str
    title: str
    words: str
    """For somebody who has never heard of it."""
    settings: dict[str, Any]
    cached: bool
    batched: bool
    speculation: str = "off"
    """off, always, auto."""
    raw: bool = False
    """Drafts with the model's untrained first layers (see `raw_draft`): beside the stages, not one of them."""


_NOTHING = {
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "speculation": "off",
}


def stages(max_num_seqs: int) -> tuple[Stage, ...]:
    """The stages in order; `max_num_seqs` is what the server allows at once when batching is on."""
    cache = _NOTHING | {"enable_prefix_caching": True}
    batch = cache | {"max_num_seqs": max_num_seqs, "enable_chunked_prefill": True}
    return (
        Stage(
            "0",
            "nothing",
            "One request at a time. Every prompt is computed from its first word.",
            _NOTHING,
            cached=False,
            batched=False,
        ),
        Stage(
            "1",
            "+ prefix cache",
            "What is the same at the start of every prompt is computed once and remembered.",
            cache,
            cached=True,
            batched=False,
        ),
        Stage(
            "2",
            "+ batching",
            "Several answers grow at the same time; a new prompt is taken in pieces between their tokens.",
            batch,
            cached=True,
            batched=True,
        ),
        Stage(
            "3",
            "+ speculation, always",
            "The next words are guessed cheaply and checked several at once, in every step.",
            batch | {"speculation": "always"},
            cached=True,
            batched=True,
            speculation="always",
        ),
        Stage(
            "3a",
            "+ speculation, auto",
            "The same, but only while the guesses are good enough to pay. Not to guess is a valid choice.",
            batch | {"speculation": "auto"},
            cached=True,
            batched=True,
            speculation="auto",
        ),
    )


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """One trial, raw: what is written to the journal and to the JSON file."""

    stage: str
    concurrency: int
    repeat: int
    cache_salt: str
    wall: float
    records: list[Record]
    counters: dict[str, float]
    health: ClientHealth
    settings: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    """Seconds since the benchmark began (of the run that measured it)."""
    invalid: str | None = None
    """Why the stage's premise did not hold; such figures mean nothing."""
    untrusted: str | None = None
    """Why the client itself may have distorted the figures."""

    def trial(self) -> Trial:
        return Trial(records=self.records, wall=self.wall, health=self.health, counters=self.counters)


@dataclass(frozen=True, slots=True)
class Expected:
    """What premises are checked against."""

    max_tokens: int
    shared_tokens: int
    """Tokens of the shared system prompt."""
    block_size: int

    @property
    def least_cached(self) -> int:
        """The cache works in whole blocks, and a template may weave the end of the system prompt into what
        follows: two blocks of grace."""
        return max(1, self.shared_tokens - 2 * self.block_size)


# -------------------------------------------------------------------- premises


def broken_premise(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    """The first premise of `stage` that does not hold in `result`, in words; None if all do."""
    checks: tuple[Callable[[Stage, TrialResult, Expected], str | None], ...] = (
        _all_answered,
        _settings_taken,
        _cache,
        _batching,
        _speculation,
    )
    return next(filter(None, (check(stage, result, expected) for check in checks)), None)


def _all_answered(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    failed = [record for record in result.records if not record.ok]
    if failed or not result.records:
        first = failed[0].error if failed else "no request was sent"
        return f"{len(failed)} of {len(result.records)} requests failed: {first}"
    if any(record.completion_tokens is None for record in result.records):
        return "the server does not report completion_tokens"
    short = sum(record.completion_tokens != expected.max_tokens for record in result.records)
    return f"{short} answers do not have {expected.max_tokens} tokens" if short else None


def _settings_taken(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    wrong = [
        f"{name} is {result.settings.get(name)!r}, not {wanted!r}"
        for name, wanted in stage.settings.items()
        if result.settings.get(name) != wanted
    ]
    return "the server did not take the settings: " + "; ".join(wrong) if wrong else None


def _cache(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    cached = [record.cached_tokens for record in result.records]
    known = [tokens for tokens in cached if tokens is not None]
    if len(known) < len(cached):
        return "the server does not report cached_tokens"
    impossible = [r for r in result.records if (r.cached_tokens or 0) > (r.prompt_tokens or 0)]
    if impossible:
        worst = impossible[0]
        return f"{worst.cached_tokens} of {worst.prompt_tokens} prompt tokens cannot have come from the cache"
    if not stage.cached and any(known):
        return f"the cache should be off, but up to {max(known)} prompt tokens came from it"
    if stage.cached and min(known) < expected.least_cached:
        return f"only {min(known)} prompt tokens came from the cache; at least {expected.least_cached} should"
    return None


def _batching(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    most = result.trial().max_overlap()
    if not stage.batched and most > 1:
        return f"one request at a time was asked for, but {most} answers were growing at once"
    if stage.batched and result.concurrency > 1 and most < 2:
        return "never did two answers grow at the same time"
    return None


def _speculation(stage: Stage, result: TrialResult, expected: Expected) -> str | None:
    drafted = result.counters.get("drafted")
    if drafted is None:
        return "the server does not count drafted tokens" if stage.speculation != "off" else None
    if stage.speculation == "off" and drafted:
        return f"speculation should be off, but {drafted:.0f} tokens were drafted"
    if stage.speculation == "always" and not drafted:
        return "speculation is always on, but nothing was drafted"
    if stage.speculation == "auto" and not drafted and not speculation_reason(result):
        return "nothing was drafted, and the server gives no reason"
    return None


def speculation_reason(result: TrialResult) -> str:
    """Why the server speculates or not, in its own words; empty if it says nothing."""
    return str(result.speculation.get("reason") or "")


# -------------------------------------------------------------------- rows


@dataclass(slots=True, kw_only=True)
class Row:
    """One stage at one concurrency over its repeats. Spreads are median ± MAD over the valid repeats."""

    stage: str
    title: str
    concurrency: int
    repeats: int
    ttft_p50: metrics.Spread | None
    """ms."""
    ttft_p95: float | None
    """ms, over the requests of all repeats together: one repeat has too few for a 95th percentile."""
    tpot: metrics.Spread | None
    rate: metrics.Spread | None
    utilisation: metrics.Spread | None
    hit_rate: metrics.Spread | None
    acceptance: metrics.Spread | None
    tokens_per_chunk: float | None
    same_texts: tuple[int, int] | None
    """(equal, compared) greedy texts against stage 0 of the same repeat and concurrency."""
    invalid: str | None
    untrusted: str | None
    note: str


def summarise(all_stages: Sequence[Stage], results: Sequence[TrialResult]) -> list[Row]:
    """Rows by concurrency, then by stage, of what has been measured."""
    rows = []
    for concurrency in sorted({result.concurrency for result in results}):
        for stage in all_stages:
            mine = [r for r in results if r.stage == stage.key and r.concurrency == concurrency]
            if mine:
                rows.append(_row(stage, concurrency, mine, results))
    return rows


def _row(stage: Stage, concurrency: int, mine: list[TrialResult], results: Sequence[TrialResult]) -> Row:
    valid = [result for result in mine if result.invalid is None]
    records = [record for result in valid for record in result.records]

    def over_trials(key: str) -> metrics.Spread | None:
        return metrics.spread(metrics.METRICS[key](result.trial()) for result in valid)

    def over_medians(key: str) -> metrics.Spread | None:
        return metrics.spread(metrics.over_requests(key, result.records, 50) for result in valid)

    return Row(
        stage=stage.key,
        title=stage.title,
        concurrency=concurrency,
        repeats=len(mine),
        ttft_p50=over_medians("ttft"),
        ttft_p95=metrics.over_requests("ttft", records, 95),
        tpot=over_medians("tpot"),
        rate=over_trials("output_rate"),
        utilisation=over_trials("utilisation"),
        hit_rate=over_trials("hit_rate"),
        acceptance=over_trials("acceptance_rate"),
        tokens_per_chunk=metrics.over_requests("tokens_per_chunk", records, 50),
        same_texts=_same_texts(stage, mine, results),
        invalid=next((result.invalid for result in mine if result.invalid), None),
        untrusted=next((result.untrusted for result in mine if result.untrusted), None),
        note=_note(stage, concurrency, valid),
    )


def _note(stage: Stage, concurrency: int, valid: list[TrialResult]) -> str:
    if stage.key == "2" and concurrency == 1:
        return "no effect expected: with one user there is nothing to batch"
    parts = []
    if stage.speculation == "auto" and valid:
        parts.append(speculation_reason(valid[-1]))
    if stage.raw and sum(len(result.records) for result in valid) == 1:
        parts.append("one trial of one request; --raw-draft full measures it as the stages are")
    return "; ".join(filter(None, parts))


def _same_texts(
    stage: Stage, mine: list[TrialResult], results: Sequence[TrialResult]
) -> tuple[int, int] | None:
    """Texts are compared within a repeat, prompt by prompt, so that both sides answered the same prompts."""
    if stage.key == "0":
        return None
    equal = compared = 0
    for result in mine:
        reference = {
            record.name: record.text
            for other in results
            if other.stage == "0" and (other.concurrency, other.repeat) == (result.concurrency, result.repeat)
            for record in other.records
        }
        for record in result.records:
            if record.name in reference:
                compared += 1
                equal += record.text == reference[record.name]
    return (equal, compared) if compared else None


def headline(rows: Sequence[Row]) -> str | None:
    """What the stages did to the first token, in one sentence; None if the ends to compare are missing."""
    parts = []
    for concurrency in sorted({row.concurrency for row in rows}):
        usable = [r for r in rows if r.concurrency == concurrency and r.ttft_p50 and not r.invalid]
        first = next((row for row in usable if row.stage == "0"), None)
        last = next((row for row in usable if row.stage == "2"), None)
        if first and last and first.ttft_p50 and last.ttft_p50:
            users = "one user" if concurrency == 1 else f"{concurrency} users at once"
            before, after = first.ttft_p50.median, last.ttft_p50.median
            parts.append(f"{users}: {before:.0f} ms → {after:.0f} ms ({before / after:.1f}x earlier)")
    return "; ".join(parts) or None
