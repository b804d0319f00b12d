"""`draft train` from end to end on a tiny model: the same seed gives the same draft, also through an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from firsttoken.drafting.check import check_draft
from firsttoken.drafting.make import HELD_OUT, Recipe, make_draft
from tests.drafting.folder import write_chat_model

CPU = torch.device("cpu")
PROMPTS = ["the first token", "a server answers", "numbers"]
"""Given, so that a row need not be long to come to an answer."""
SIZES = {
    "rows": 8,
    "length": 48,
    "shard_rows": 8,
    "held_out_rows": 2,
    "batch_rows": 4,
    "anchors": 8,
    "draft_vocab_size": 64,
    "shared_layers": 1,
    "tuned_layers": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


class Stop(Exception):
    pass


def test_a_feature_draft_comes_out_the_same_and_with_its_report(model, tmp_path):
    recipe = Recipe(kind="feature", steps=16, depth=3, **SIZES)
    one = make_draft(model, tmp_path / "one", recipe, device=CPU, prompts=PROMPTS, work=tmp_path / "work-1")
    stopped, told = tmp_path / "two", []

    def stop_half_way(stage, done, total, word):
        told.append((stage, done))
        if stage == HELD_OUT and done == 8:
            raise Stop

    work = tmp_path / "work-2"
    with pytest.raises(Stop):
        make_draft(model, stopped, recipe, device=CPU, prompts=PROMPTS, work=work, on_progress=stop_half_way)
    assert (HELD_OUT, 2) in told
    again: list[tuple[str, int]] = []
    two = make_draft(
        model,
        stopped,
        recipe,
        device=CPU,
        prompts=PROMPTS,
        work=work,
        on_progress=lambda stage, done, total, word: again.append((stage, done)),
    )
    assert min(done for stage, done in again if stage == "training") == 8
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one["tokens_per_cycle"] == two["tokens_per_cycle"]
    assert {f.severity for f in check_draft(model, stopped)} == {"ok"}
    assert json.loads((stopped / "recipe.json").read_text()) == two
    assert set(two["speed"]["gamma_to_use"]) == {"1", "4"}
    report = (stopped / "report.txt").read_text()
    for words in ("tokens per cycle", "speed-up, predicted", "speed-up, measured", "4 requests at a time"):
        assert words in report
    assert not list(work.glob("*.pt"))  # done: the same command would begin anew


@pytest.mark.faults
def test_a_killed_training_goes_on(model, tmp_path):
    def command(name):
        return [
            *(sys.executable, "-m", "firsttoken", "draft", "train", str(model), "--kind", "feature"),
            *("--steps", "400", "--rows", "16", "--length", "160", "--vocab", "64", "--device", "cpu"),
            *("--out", str(tmp_path / name), "--work", str(tmp_path / f"{name}-work")),
        ]

    subprocess.run(command("whole"), check=True, capture_output=True)
    process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = tmp_path / "killed-work" / "feature-training.pt"
    limit = time.monotonic() + 120
    while not state.exists():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "recipe.json").exists()
    subprocess.run(command("killed"), check=True, capture_output=True)
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
