"""The glossary as code: every figure that a benchmark prints is one of these, with its formula beside it.

A metric of a request takes a `Record`; a metric of a trial takes a `Trial`-like object (`records`, `wall`,
`counters`). Each returns a float in its unit, or None: a value that is missing is no value, never 0.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firsttoken.bench.client import Record


@dataclass(frozen=True, slots=True)
class Metric:
    """A named function. Calling it gives the value or None."""

    key: str
    label: str
    unit: str
    function: Callable[[Any], float | None]
    formula: str
    meaning: str

    def __call__(self, subject: Any) -> float | None:
        return self.function(subject)


METRICS: dict[str, Metric] = {}
"""Every metric by key, in the order of the glossary."""


def metric(label: str, unit: str) -> Callable[[Callable[[Any], float | None]], Metric]:
    """Registers a function whose docstring is `Formula: …` and then what it means."""

    def register(function: Callable[[Any], float | None]) -> Metric:
        text = inspect.getdoc(function) or ""
        head, _, meaning = text.partition("\n")
        formula = head.removeprefix("Formula: ")
        METRICS[function.__name__] = Metric(
            function.__name__, label, unit, function, formula, " ".join(meaning.split())
        )
        return METRICS[function.__name__]

    return register


# -------------------------------------------------------------------- of one request (milliseconds)


@metric("TTFB", "ms")
def ttfb(record: Record) -> float | None:
    """Formula: first response byte − sent
    The network and the web server; says nothing about the model."""
    return None if record.first_byte is None else record.first_byte * 1e3


@metric("TTFT", "ms")
def ttft(record: Record) -> float | None:
    """Formula: first chunk with a non-empty token (content or reasoning) − sent
    Never the role chunk, an empty chunk or a ping: the time until there is something to show."""
    return record.chunks[0][0] * 1e3 if record.ok and record.chunks else None


@metric("TTFT from intent", "ms")
def ttft_intended(record: Record) -> float | None:
    """Formula: first token − the time at which the request was due
    Also counts what the client was late, as a user would (no coordinated omission)."""
    value = ttft(record)
    return None if value is None else value + (record.sent - record.intended) * 1e3


@metric("TTFVT", "ms")
def ttfvt(record: Record) -> float | None:
    """Formula: first visible (not reasoning) token − sent"""
    return None if not record.ok or record.first_visible is None else record.first_visible * 1e3


@metric("TPOT", "ms")
def tpot(record: Record) -> float | None:
    """Formula: (last token time − first token time) / (output tokens − 1)
    Tokens by the server's own count, so that several in a chunk count as several. No value for one token."""
    if (
        not record.ok
        or not record.completion_tokens
        or record.completion_tokens < 2
        or len(record.chunks) < 2
    ):
        return None
    return (record.chunks[-1][0] - record.chunks[0][0]) * 1e3 / (record.completion_tokens - 1)


@metric("longest ICL", "ms")
def icl_max(record: Record) -> float | None:
    """Formula: largest gap between two chunks
    The longest stall while reading. Chunks, not tokens: with speculation a chunk holds several."""
    gaps = icl(record)
    return max(gaps) if gaps else None


def icl(record: Record) -> list[float]:
    """Inter-chunk latencies of one request, in ms: the gaps between chunks that hold tokens."""
    times = [time for time, _ in record.chunks]
    return [(b - a) * 1e3 for a, b in pairwise(times)]


@metric("tokens per chunk", "tokens")
def tokens_per_chunk(record: Record) -> float | None:
    """Formula: output tokens / chunks with a token"""
    if not record.ok or record.completion_tokens is None or not record.chunks:
        return None
    return record.completion_tokens / len(record.chunks)


@metric("duration", "ms")
def duration(record: Record) -> float | None:
    """Formula: end of the answer − sent"""
    return None if record.ended is None or not record.ok else record.ended * 1e3


# -------------------------------------------------------------------- of one trial


@metric("output rate", "tok/s")
def output_rate(trial: Any) -> float | None:
    """Formula: output tokens of all requests that succeeded / wall time of the trial"""
    tokens = [r.completion_tokens for r in trial.records if r.ok]
    if not tokens or None in tokens or trial.wall <= 0:
        return None
    return float(sum(tokens)) / float(trial.wall)


@metric("hit rate", "%")
def hit_rate(trial: Any) -> float | None:
    """Formula: 100 · cached prompt tokens / prompt tokens
    By the usage of each answer: what the prefix cache spared."""
    pairs = [(r.cached_tokens, r.prompt_tokens) for r in trial.records if r.ok]
    if not pairs or any(cached is None or not prompt for cached, prompt in pairs):
        return None
    return float(100 * sum(cached for cached, _ in pairs) / sum(prompt for _, prompt in pairs))


@metric("acceptance rate", "%")
def acceptance_rate(trial: Any) -> float | None:
    """Formula: 100 · accepted draft tokens / drafted tokens"""
    drafted, accepted = trial.counters.get("drafted"), trial.counters.get("accepted")
    return 100.0 * accepted / drafted if drafted and accepted is not None else None


@metric("acceptance length", "tokens")
def acceptance_length(trial: Any) -> float | None:
    """Formula: 1 + accepted draft tokens / drafts
    Tokens per verification, the bonus token included."""
    drafts, accepted = trial.counters.get("drafts"), trial.counters.get("accepted")
    return 1.0 + accepted / drafts if drafts and accepted is not None else None


@metric("utilisation", "%")
def utilisation(trial: Any) -> float | None:
    """Formula: CPU: 100 · engine CPU seconds / (wall · cores); GPU: mean of NVML's utilisation"""
    gpu = trial.counters.get("gpu_percent")
    if gpu is not None:
        return float(gpu)
    cpu, cores = trial.counters.get("cpu_seconds"), trial.counters.get("cores")
    return 100.0 * cpu / (trial.wall * cores) if cpu is not None and cores and trial.wall > 0 else None


def goodput(records: Iterable[Record], wall: float, limits: dict[str, float]) -> float | None:
    """Formula: requests that meet ALL limits / wall time, in requests per second.

    limits: upper bounds in ms by metric key, as {"ttft_intended": 500, "tpot": 30}. A failed request, and one
    without a value for a limited metric, meets nothing; but one token has no TPOT and nothing to miss."""
    if wall <= 0:
        return None
    return sum(meets(record, limits) for record in records) / wall


def meets(record: Record, limits: dict[str, float]) -> bool:
    if not record.ok:
        return False
    for key, limit in limits.items():
        value = METRICS[key](record)
        if value is None and key == "tpot" and record.completion_tokens == 1:
            continue
        if value is None or value > limit:
            return False
    return True


# -------------------------------------------------------------------- summaries


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """The q-th percentile (0..100) with linear interpolation between ranks, over the values that exist."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    rank = (len(known) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(known) - 1)
    return known[low] + (known[high] - known[low]) * (rank - low)


@dataclass(slots=True, frozen=True)
class Spread:
    """A median over repeats, with its median absolute deviation; n repeats had a value."""

    median: float
    mad: float
    n: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median ± MAD. MAD = median(|x − median(x)|): one odd repeat moves neither."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    middle = statistics.median(known)
    return Spread(middle, statistics.median(abs(v - middle) for v in known), len(known))


def over_requests(key: str, records: Iterable[Record], q: float) -> float | None:
    """Percentile of a request metric over the requests that succeeded."""
    return percentile((METRICS[key](r) for r in records if r.ok), q)
