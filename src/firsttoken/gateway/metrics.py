"""Prometheus metrics: plain numbers on the hot path, merged over the workers and rendered off the event loop.

Histograms are by model and upstream. Per key there are counters and one small TTFT histogram, for the 200 busiest
keys by name and the rest as `other` (1,000 keys with full histograms are 162,000 lines and a second of blocked
loop per scrape). `other` may fall when a key joins the 200; totals are in the metrics by model. The key itself is
nowhere.

Each worker writes its numbers to a file of its own every few seconds; the one that is asked adds them up.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from firsttoken.gateway.journal import Record

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
# fmt: off
TTFT_S = (
    .01, .02, .03, .05, .075, .1, .15, .2, .25, .3, .4, .5, .75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0
)
# fmt: on
DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)  # fmt: skip
GATEWAY_S = (.0001, .0002, .0003, .0005, .001, .002, .005, .01, .05, .1, .5)  # fmt: skip
LAG_S = (.0005, .001, .002, .005, .01, .02, .05, .1, .5, 1.0)  # fmt: skip
KEY_TTFT_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""With +Inf these are 8 buckets."""
NAMED_KEYS = 200
STATUSES = ("ok", "error", "aborted", "limited")
TOKENS = ("prompt", "cached", "completion", "drafted", "accepted")


class Histogram(msgspec.Struct):
    counts: list[int]
    """Per bucket, not cumulative; the last is +Inf."""
    sum: float = 0.0

    def observe(self, bounds: tuple[float, ...], value: float) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


def _empty(bounds: tuple[float, ...]) -> Histogram:
    return Histogram([0] * (len(bounds) + 1))


class ModelNumbers(msgspec.Struct):
    """Of one (model, upstream, traffic)."""

    statuses: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    tokens: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(TOKENS, 0))
    ttft: Histogram = msgspec.field(default_factory=lambda: _empty(TTFT_S))
    duration: Histogram = msgspec.field(default_factory=lambda: _empty(DURATION_S))
    gateway: Histogram = msgspec.field(default_factory=lambda: _empty(GATEWAY_S))


class KeyNumbers(msgspec.Struct):
    statuses: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: Histogram = msgspec.field(default_factory=lambda: _empty(KEY_TTFT_S))

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


class Numbers(msgspec.Struct):
    """Everything that one worker counts; this is also the file format."""

    models: dict[str, ModelNumbers] = {}
    """By "model\\nupstream\\ntraffic"."""
    keys: dict[str, KeyNumbers] = {}
    """By key name."""
    lag: Histogram = msgspec.field(default_factory=lambda: _empty(LAG_S))
    in_flight: int = 0
    upstreams: dict[str, list[float]] = {}
    """Name → [up, in flight, expected TTFT in seconds]."""

    def add(self, other: Numbers) -> None:
        for label, theirs in other.models.items():
            mine = self.models.setdefault(label, ModelNumbers())
            _add(mine.statuses, theirs.statuses)
            _add(mine.tokens, theirs.tokens)
            mine.ttft.add(theirs.ttft)
            mine.duration.add(theirs.duration)
            mine.gateway.add(theirs.gateway)
        for name, their in other.keys.items():
            self.key(name, their)
        self.lag.add(other.lag)
        self.in_flight += other.in_flight
        for name, (up, in_flight, expected) in other.upstreams.items():
            old = self.upstreams.get(name, [1.0, 0.0, 0.0])
            self.upstreams[name] = [min(old[0], up), old[1] + in_flight, max(old[2], expected)]

    def key(self, name: str, theirs: KeyNumbers) -> None:
        mine = self.keys.setdefault(name, KeyNumbers())
        _add(mine.statuses, theirs.statuses)
        mine.prompt_tokens += theirs.prompt_tokens
        mine.completion_tokens += theirs.completion_tokens
        mine.ttft.add(theirs.ttft)


def _add(mine: dict[str, int], theirs: dict[str, int]) -> None:
    for name, value in theirs.items():
        mine[name] = mine.get(name, 0) + value


class Metrics:
    """The numbers of this worker, and the way to all workers' numbers."""

    def __init__(self, folder: Path | None, worker: str):
        self.numbers = Numbers()
        self.path = folder / f"{worker}.numbers" if folder else None

    def observe(self, record: Record, key_name: str) -> None:
        """Counts one ended request."""
        label = f"{record.model}\n{record.upstream}\n{'load-test' if record.load_test else 'live'}"
        model = self.numbers.models.get(label)
        if model is None:
            model = self.numbers.models[label] = ModelNumbers()
        key = self.numbers.keys.get(key_name)
        if key is None:
            key = self.numbers.keys[key_name] = KeyNumbers()
        model.statuses[record.status] += 1
        key.statuses[record.status] += 1
        if record.prompt_tokens:
            model.tokens["prompt"] += record.prompt_tokens
            key.prompt_tokens += record.prompt_tokens
        if record.completion_tokens:
            model.tokens["completion"] += record.completion_tokens
            key.completion_tokens += record.completion_tokens
        model.tokens["cached"] += record.cached_tokens or 0
        model.tokens["drafted"] += record.drafted_tokens or 0
        model.tokens["accepted"] += record.accepted_tokens or 0
        if record.ttft_ms is not None:
            model.ttft.observe(TTFT_S, record.ttft_ms / 1e3)
            key.ttft.observe(KEY_TTFT_S, record.ttft_ms / 1e3)
        if record.duration_ms is not None and record.status != "limited":
            model.duration.observe(DURATION_S, record.duration_ms / 1e3)
        if record.gateway_ms is not None:
            model.gateway.observe(GATEWAY_S, record.gateway_ms / 1e3)

    def encode(self) -> bytes:
        """A snapshot; taken on the event loop, as its numbers change there."""
        return msgspec.msgpack.encode(self.numbers)

    def publish(self, snapshot: bytes) -> None:
        """Writes a snapshot for the other workers; off the event loop."""
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_bytes(snapshot)
            os.replace(new, self.path)

    def render(self, snapshot: bytes) -> bytes:
        """The text for Prometheus, of all workers; off the event loop."""
        total = msgspec.msgpack.decode(snapshot, type=Numbers)
        if self.path is not None:
            for path in self.path.parent.glob("*.numbers"):
                if path != self.path:
                    with contextlib.suppress(OSError, msgspec.DecodeError):
                        total.add(msgspec.msgpack.decode(path.read_bytes(), type=Numbers))
        registry = CollectorRegistry()
        registry.register(_Rendered(total))
        return generate_latest(registry)


class _Rendered(Collector):
    def __init__(self, numbers: Numbers):
        self.numbers = numbers

    def collect(self) -> Iterator[Metric]:
        yield from self._models()
        yield from self._keys()
        yield _gauge("firsttoken_gateway_in_flight", "Requests that run now.", self.numbers.in_flight)
        lag = HistogramMetricFamily(
            "firsttoken_gateway_event_loop_lag_seconds", "How late a timer of 100 ms fired, in any worker."
        )
        _buckets(lag, [], LAG_S, self.numbers.lag)
        yield lag
        up = GaugeMetricFamily(
            "firsttoken_gateway_upstream_up", "1 while the upstream answers.", labels=["upstream"]
        )
        busy = GaugeMetricFamily(
            "firsttoken_gateway_upstream_in_flight",
            "Requests that run at the upstream now.",
            labels=["upstream"],
        )
        expected = GaugeMetricFamily(
            "firsttoken_gateway_upstream_expected_ttft_seconds",
            "What the router goes by.",
            labels=["upstream"],
        )
        for name, values in self.numbers.upstreams.items():
            for family, value in zip((up, busy, expected), values, strict=True):
                family.add_metric([name], value)
        yield from (up, busy, expected)

    def _models(self) -> Iterator[Metric]:
        labels = ["model", "upstream", "traffic"]
        prefix = "firsttoken_gateway_"
        requests = CounterMetricFamily(
            f"{prefix}requests", "Requests ended, by how.", labels=[*labels, "status"]
        )
        tokens = CounterMetricFamily(
            f"{prefix}tokens", "Tokens, by the upstream's count.", labels=[*labels, "kind"]
        )
        ttft = HistogramMetricFamily(
            f"{prefix}time_to_first_token_seconds",
            "Request received to first token passed on.",
            labels=labels,
        )
        duration = HistogramMetricFamily(
            f"{prefix}request_duration_seconds", "Whole requests.", labels=labels
        )
        own = HistogramMetricFamily(
            f"{prefix}own_seconds",
            "Request received to request forwarded: the gateway's own share.",
            labels=labels,
        )
        for label, numbers in self.numbers.models.items():
            names = label.split("\n")
            for status, count in numbers.statuses.items():
                requests.add_metric([*names, status], count)
            for kind, count in numbers.tokens.items():
                tokens.add_metric([*names, kind], count)
            _buckets(ttft, names, TTFT_S, numbers.ttft)
            _buckets(duration, names, DURATION_S, numbers.duration)
            _buckets(own, names, GATEWAY_S, numbers.gateway)
        yield from (requests, tokens, ttft, duration, own)

    def _keys(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "firsttoken_gateway_key_requests", "Requests of a key.", labels=["key", "status"]
        )
        tokens = CounterMetricFamily(
            "firsttoken_gateway_key_tokens", "Tokens of a key.", labels=["key", "kind"]
        )
        ttft = HistogramMetricFamily(
            "firsttoken_gateway_key_time_to_first_token_seconds", "TTFT of a key.", labels=["key"]
        )
        ranked = sorted(self.numbers.keys.items(), key=lambda item: -item[1].requests)
        shown = Numbers(keys=dict(ranked[:NAMED_KEYS]))
        for _, rest in ranked[NAMED_KEYS:]:
            shown.key("other", rest)
        for name, numbers in shown.keys.items():
            for status, count in numbers.statuses.items():
                requests.add_metric([name, status], count)
            tokens.add_metric([name, "prompt"], numbers.prompt_tokens)
            tokens.add_metric([name, "completion"], numbers.completion_tokens)
            _buckets(ttft, [name], KEY_TTFT_S, numbers.ttft)
        yield from (requests, tokens, ttft)


def _gauge(name: str, help: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, help)
    family.add_metric([], value)
    return family


def _buckets(
    family: HistogramMetricFamily, labels: list[str], bounds: tuple[float, ...], histogram: Histogram
) -> None:
    cumulative, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), histogram.counts, strict=True):
        cumulative += count
        buckets.append((bound, cumulative))
    family.add_metric(labels, buckets, histogram.sum)
