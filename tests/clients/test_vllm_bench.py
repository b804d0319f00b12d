"""`vllm bench serve`, with both of its OpenAI backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import NAME, Server, installed, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
def test_bench_serve(server: Server, tmp_path: Path, backend: str, endpoint: str) -> None:
    run(
        [
            installed("vllm"), "bench", "serve", "--backend", backend, "--base-url", server.url, "--endpoint", endpoint,
            "--model", NAME, "--tokenizer", server.folder, "--dataset-name", "random", "--random-input-len", "48",
            "--random-output-len", "8", "--ignore-eos", "--num-prompts", "8", "--max-concurrency", "4",
            "--seed", "1", "--percentile-metrics", "ttft,tpot,itl,e2el",
            "--save-result", "--save-detailed", "--result-filename", "result.json",
        ],
        tmp_path,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["output_lens"] == [8] * 8
    assert not any(result["errors"])
    assert all(seconds > 0 for seconds in result["ttfts"])
    assert all(len(gaps) > 0 for gaps in result["itls"])
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
