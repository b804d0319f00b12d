"""/metrics: names that dashboards know, and counts that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firsttoken.backends.base import EngineStats
from firsttoken.observe.prometheus import ServerMetrics

from .running import Running, running


def values(server: Running) -> dict[str, float]:
    text = server.request("GET", "/metrics").body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name", "le")}
            key = sample.name + "".join(f" {k}={v}" for k, v in labels.items())
            found[key] = sample.value
    return found


def test_what_requests_leave_behind(model_folder: Path) -> None:
    with running(model_folder) as server:
        server.says("one two three")
        tokens = len(server.tokenizer.encode("one two three"))
        server.chat()
        server.chat(n=2, max_tokens=2)
        server.chat(stream=True, stop="two")
        server.chat(temperature=-1)
        server.backend.stopped = True
        with server.open("/v1/completions", {"prompt": "x"}):
            server.until(lambda: bool(server.backend.live), "it runs")
            assert values(server)["vllm:num_requests_running"] == 1
        server.until(lambda: not server.backend.live, "it was aborted")
        got = values(server)
        ended = {k.split("=")[1]: v for k, v in got.items() if k.startswith("vllm:request_success_total")}
        assert ended == {"stop": 2, "length": 2, "abort": 1, "error": 0}
        assert got["vllm:time_to_first_token_seconds_count"] == 4
        assert got["vllm:e2e_request_latency_seconds_count"] == 4
        assert got["vllm:request_queue_time_seconds_sum"] == pytest.approx(3 * 0.001)
        assert got["vllm:request_prefill_time_seconds_count"] == 3
        assert got["vllm:request_prompt_tokens_count"] == 3
        assert got["vllm:inter_token_latency_seconds_count"] >= tokens + 2
        for part in ("template", "tokenize", "queue", "prefill"):
            assert got[f"firsttoken:first_token_part_seconds_count part={part}"] == 3
        assert got["vllm:num_requests_running"] == 0
        assert got["vllm:kv_cache_usage_perc"] == 0


NAMES = """
vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds vllm:request_time_per_output_token_seconds
vllm:e2e_request_latency_seconds vllm:request_queue_time_seconds vllm:request_prefill_time_seconds
vllm:request_decode_time_seconds vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:num_preemptions_total vllm:request_success_total vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_accepted_tokens_per_pos_total
"""


def test_names(server: Running) -> None:
    server.backend.stats().accepted_tokens_per_pos = [3, 1]
    text = server.request("GET", "/metrics").body.decode()
    for name in NAMES.split():
        assert f"\n{name}{{" in text or f"\n{name}_bucket{{" in text, name
    assert (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="scripted",position="1"} 1.0'
        in text
    )


def test_speculation_by_position_and_why() -> None:
    stats = EngineStats(
        num_drafts=10,
        num_draft_tokens=25,
        num_accepted_tokens=15,
        draft_tokens_per_pos=[10, 10, 5],
        accepted_tokens_per_pos=[9, 5, 1],
        emitted_tokens_per_pos=[10, 9, 5, 1],
        speculation={
            "active": False,
            "drafter": "separate draft raw",
            "verdict": "too slow",
            "gamma": 0,
            "speedup": 0.5,
            "predicted_speedup": None,
        },
    )
    text = ServerMetrics("m", lambda: stats, lambda: True).render().decode()
    got = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            got[sample.name, *labels.values()] = sample.value
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    drafted = "firsttoken:spec_decode_num_draft_tokens_per_pos_total"
    emitted = "firsttoken:spec_decode_num_emitted_tokens_per_pos_total"
    assert [got[accepted, str(i)] for i in range(3)] == [9, 5, 1]
    assert [got[drafted, str(i)] for i in range(3)] == [10, 10, 5]
    assert [got[emitted, str(i)] for i in range(4)] == [10, 9, 5, 1]
    assert got["firsttoken:spec_decode_acceptance_rate",] == pytest.approx(0.6)
    assert got["firsttoken:spec_decode_acceptance_length",] == pytest.approx(2.5)
    assert got["firsttoken:spec_decode_state", "separate draft raw", "too slow"] == 0
    assert got["firsttoken:spec_decode_speedup",] == 0.5
    assert ("firsttoken:spec_decode_predicted_speedup",) not in got, "no value instead of zero"
