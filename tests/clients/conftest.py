"""SmolLM2 served in float32 as for a user, for clients that are not ours; and its answers by transformers.

Clients with many dependencies are looked for on the PATH, or where a variable says: VLLM, LM_EVAL.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from firsttoken.bench.server_process import firsttoken_serve, serve

NAME = "smollm2-135m"
LIMIT = 280
"""Seconds after which a client that hangs is a failed test."""


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path
    log: Path


@pytest.fixture(scope="session")
def server(smollm2: Path) -> Iterator[Server]:
    flags = ["--served-model-name", NAME, "--dtype", "float32"]
    with serve(firsttoken_serve(str(smollm2), flags)) as served:
        asyncio.run(served.ready(LIMIT))
        yield Server(served.url, smollm2, served.log)


def installed(command: str) -> str:
    """The path of a client's command; the test is skipped where it is not installed."""
    path = os.environ.get(command.upper()) or shutil.which(command)
    if path is None:
        pytest.skip(f"{command} is not installed: put it on the PATH, or its path into {command.upper()}")
    return path


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a client prints; fails unless it ends with 0. It finds the local server and no other address."""
    offline = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"),
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OPENAI_API_KEY": "none", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


class Reference:
    """transformers' own answers with the same weights in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def score(self, ids: list[int], start: int) -> tuple[float, bool]:
        """log P(ids[start:] | ids[:start]), summed in float64, and whether every one of them is the likeliest."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, start - 1 : -1].double()
        rest = torch.tensor(ids[start:])
        logprobs = logits.log_softmax(-1).gather(1, rest[:, None])
        return float(logprobs.sum()), bool((logits.argmax(-1) == rest).all())

    def likeliest(self, ids: list[int]) -> int:
        import torch

        with torch.inference_mode():
            return int(self.model(torch.tensor([ids])).logits[0, -1].argmax())

    def greedy(self, ids: list[int], num_tokens: int) -> str:
        import torch

        with torch.inference_mode():
            out = self.model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False)
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)
