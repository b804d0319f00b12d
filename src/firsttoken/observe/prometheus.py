"""What /metrics says: vLLM's names, so that dashboards work as they are, and the first token's time by parts.

Histograms are filled by the server as answers go out. Counters and gauges of the engine are read from its
newest snapshot when they are asked for, so they cost nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from firsttoken.backends.base import EngineStats

disable_created_metrics()  # type: ignore[no-untyped-call]  # a line more per histogram, which nobody reads

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (
    .001, .002, .005, .01, .02, .03, .04, .06, .08, .1, .15, .2, .25, .3, .4, .5, .75, 1, 2.5, 5, 10, 30, 60
)  # fmt: skip
_GAP = (
    .001, .002, .005, .01, .015, .02, .03, .04, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5
)  # fmt: skip
_WHOLE = (.05, .1, .2, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)  # fmt: skip
_SMALL = (.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

PARTS = ("template", "tokenize", "queue", "prefill", "first_decode")
FINISH_REASONS = ("stop", "length", "abort", "error")


class DeltaTimes(Protocol):
    """One engine step's part of an answer; see `firsttoken.server.generation.Delta`."""

    seconds: float | None
    is_first: bool


class ServerMetrics:
    """The metrics of one served model. `stats` gives the engine's newest snapshot."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], healthy: Callable[[], bool]
    ) -> None:
        self._labels = {"engine": "0", "model_name": model_name}
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token, in the server.", _FIRST_TOKEN
        )
        self._gap = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two outputs of an answer; one may hold several tokens.",
            _GAP,
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, per answer.",
            _GAP,
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to first scheduled.", _FIRST_TOKEN
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First scheduled to first token.", _FIRST_TOKEN
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First to last token.", _WHOLE)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._generation = self._histogram("vllm:request_generation_tokens", "Tokens per answer.", _TOKENS)
        parts = Histogram(
            "firsttoken:first_token_part_seconds",
            "Where the time to the first token went; first_decode is from the first to the second token.",
            [*self._labels, "part"],
            buckets=_SMALL,
            registry=self._registry,
        )
        self._parts = {part: parts.labels(**self._labels, part=part) for part in PARTS}
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._registry.register(_Engine(self._labels, stats, healthy, self._finished))
        ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, help, list(self._labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._labels)

    def observe_delta(self, delta: DeltaTimes) -> None:
        if delta.seconds is not None:
            (self._first_token if delta.is_first else self._gap).observe(delta.seconds)

    def observe_request(self, prompt_tokens: int, parts: Mapping[str, float]) -> None:
        """Once per request that made a token: `parts` as in `PARTS`, in seconds."""
        self._prompt.observe(prompt_tokens)
        for part, histogram in self._parts.items():
            if part in parts:
                histogram.observe(parts[part])
        if "queue" in parts:
            self._queue.observe(parts["queue"])
        if "prefill" in parts:
            self._prefill.observe(parts["prefill"])

    def observe_answer(
        self, finish_reason: str, tokens: int, first: float | None, whole: float | None
    ) -> None:
        """Once per answer, ended or aborted. `first`, `whole`: seconds from arrival to first and last token."""
        self._finished[finish_reason] = self._finished.get(finish_reason, 0) + 1
        if first is None or whole is None:
            return
        self._generation.observe(tokens)
        self._whole.observe(whole)
        self._decode.observe(whole - first)
        if tokens > 1:
            self._per_token.observe((whole - first) / (tokens - 1))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's counters and gauges, as of its newest snapshot."""

    def __init__(
        self,
        labels: dict[str, str],
        stats: Callable[[], EngineStats],
        healthy: Callable[[], bool],
        finished: dict[str, int],
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._healthy = healthy
        self._finished = finished

    def collect(self) -> Iterator[Metric]:
        s = self._stats()
        total = max(1, s.num_blocks_total)
        yield self._gauge("vllm:num_requests_running", "Sequences being computed.", s.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting.", s.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", s.num_blocks_used / total
        )
        yield self._gauge("firsttoken:kv_blocks_used", "KV blocks that live requests use.", s.num_blocks_used)
        yield self._gauge(
            "firsttoken:kv_blocks_pinned", "KV blocks kept for ended requests.", s.num_blocks_pinned
        )
        yield self._gauge("firsttoken:kv_blocks_total", "KV blocks in all.", s.num_blocks_total)
        yield self._gauge("firsttoken:engine_up", "1 while the engine runs, else 0.", float(self._healthy()))
        yield self._counter("vllm:prompt_tokens", "Prompt tokens taken in.", s.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens made.", s.generation_tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", s.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", s.prefix_cache_hits)
        yield self._counter(
            "vllm:num_preemptions", "Sequences put back for lack of KV blocks.", s.num_preemptions
        )
        yield self._counter("firsttoken:engine_steps", "Steps of the engine.", s.steps)
        yield self._counter("firsttoken:engine_step_seconds", "Time inside steps.", s.step_seconds)
        yield self._counter(
            "firsttoken:engine_cpu_seconds", "CPU time of the engine's process.", s.cpu_seconds
        )
        yield self._counter("vllm:spec_decode_num_drafts", "Steps that verified a draft.", s.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", s.num_draft_tokens)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", s.num_accepted_tokens
        )
        accepted = s.accepted_tokens_per_pos
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted, by place in the draft.",
            "position",
            {str(i): count for i, count in enumerate(accepted)},
        )
        yield self._counters(
            "firsttoken:spec_decode_num_draft_tokens_per_pos",
            "Drafted, by place in the draft.",
            "position",
            {str(i): count for i, count in enumerate(s.draft_tokens_per_pos)},
        )
        yield self._counters(
            "firsttoken:spec_decode_num_emitted_tokens_per_pos",
            "Given out by steps that verified a draft, by place in the step: accepted drafts and the token behind them,"
            " up to the answer's end.",
            "position",
            {str(i): count for i, count in enumerate(s.emitted_tokens_per_pos)},
        )
        yield from self._speculation(s)
        yield self._counters(
            "vllm:request_success", "Answers ended, by reason.", "finished_reason", self._finished
        )

    def _speculation(self, s: EngineStats) -> Iterator[Metric]:
        """Whether drafts are made, and the figures that decide it; none of those that are not known yet."""
        told = s.speculation
        if s.num_draft_tokens:
            yield self._gauge(
                "firsttoken:spec_decode_acceptance_rate",
                "Accepted over drafted tokens, since the start.",
                s.num_accepted_tokens / s.num_draft_tokens,
            )
            yield self._gauge(
                "firsttoken:spec_decode_acceptance_length",
                "Tokens per step that verified a draft, the one behind the drafts included, since the start.",
                1 + s.num_accepted_tokens / s.num_drafts,
            )
        for key, help in (
            ("gamma", "Tokens drafted at most in a step; 0: none."),
            ("speedup", "Measured tokens per second over those of plain steps, at the present load."),
            (
                "predicted_speedup",
                "The same, predicted of acceptance per position and costs, at the best gamma.",
            ),
            ("tokens_per_cycle", "Tokens per drafting step and sequence, at the present load."),
            ("pays_above", "Tokens per cycle at which drafting breaks even."),
            ("draft_cost", "A drafted token's time over that of a plain step."),
        ):
            if isinstance(value := told.get(key), int | float):
                yield self._gauge(f"firsttoken:spec_decode_{key}", help, value)
        metric = GaugeMetricFamily(
            "firsttoken:spec_decode_state",
            "1: drafts are made; 0: not. verdict says why: always, measuring, pays, too slow or off.",
            labels=[*self._labels, "drafter", "verdict"],
        )
        words = [str(told.get("drafter") or "none"), str(told.get("verdict") or "off")]
        metric.add_metric([*self._labels.values(), *words], float(bool(told.get("active"))))
        yield metric

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, help, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter(self, name: str, help: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, help, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counters(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        metric = CounterMetricFamily(name, help, labels=[*self._labels, label])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), key], value)
        return metric
