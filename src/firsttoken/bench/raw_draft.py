"""The recipe that people copy, as rows of the proof: the model's own first 8 layers as a draft, untrained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from firsttoken import models
from firsttoken.bench.stages import Stage
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json

LAYERS = 8
GAMMAS = (5, 8)


def make_raw_draft(model: str) -> Path | None:
    """The draft's folder, written once into FIRSTTOKEN_HOME; None for a model that has no more layers than that.

    Another process writes it: this one never holds weights.
    """
    folder = models.resolve(model)
    if int(read_json(folder, "config.json").get("num_hidden_layers", 0)) <= LAYERS:
        return None
    out = models.home() / "drafts" / f"{models.fingerprint(folder)}-first-{LAYERS}"
    if not out.exists():
        partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
        command = [sys.executable, "-m", "firsttoken", "draft", "export", str(folder)]
        command += ["--layers", str(LAYERS), "--out", str(partial)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
                raise ConfigError(f"the raw draft for row 3r can't be written: {last}; try --raw-draft off")
            if not out.exists():  # another benchmark may have been faster
                partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def raw_stages(folder: Path, batch: dict[str, Any]) -> tuple[Stage, ...]:
    """folder: the draft. batch: the settings of the stage that they are to be held against."""
    own = batch | {"draft": str(folder)}
    recipe = f"the model's own first {LAYERS} layers guess, untrained"
    always = tuple(
        Stage(
            f"3r γ{gamma}",
            f"first {LAYERS} layers, always",
            f"The recipe that people copy: {recipe}, {gamma} tokens in every step.",
            own | {"num_speculative_tokens": gamma, "speculation": "always"},
            cached=True,
            batched=True,
            speculation="always",
            raw=True,
        )
        for gamma in GAMMAS
    )
    auto = Stage(
        "3r auto",
        f"first {LAYERS} layers, auto",
        f"The same draft, but only while its guesses are good enough to pay: {recipe}, or do not.",
        own | {"num_speculative_tokens": GAMMAS[0], "speculation": "auto"},
        cached=True,
        batched=True,
        speculation="auto",
        raw=True,
    )
    return (*always, auto)
