"""Which drafter a model gets: its own draft by its weights' fingerprint, else n-grams; a wrong name is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from firsttoken import models
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.speculate.find import draft_folder_of, own_draft
from firsttoken.speculate.select import draft_memory, make_speculator


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRSTTOKEN_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.arange(8, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def store(folder: Path, target: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"firsttoken": {"kind": "feature", "target": target}}))


def test_a_model_finds_the_draft_made_for_its_weights_alone(model):
    assert own_draft(model) is None
    place = draft_folder_of(model)
    store(place, "of other weights")
    assert own_draft(model) is None
    store(place, models.fingerprint(model))
    assert own_draft(model) == place
    save_file({"w": np.arange(8, dtype=np.float32) + 1}, model / "model.safetensors")
    assert own_draft(model) is None, "a fine-tune needs a draft of its own"


def test_without_a_draft_n_grams_and_a_wrong_name_is_one_line(model):
    runner = SimpleNamespace(model=None, cache=None)
    chosen = make_speculator(EngineConfig(model=str(model)), CostModel(), runner)
    assert chosen.describe()["drafter"] == "ngram"
    with pytest.raises(ConfigError, match="no such folder"):
        make_speculator(EngineConfig(model=str(model), draft="/nowhere"), CostModel(), runner)
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architecture"):
        draft_memory(EngineConfig(model=str(model), draft=str(model)), None, torch.float32)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(ConfigError, match="make one with `firsttoken draft train`"):
        draft_memory(EngineConfig(model=str(model), draft=str(model)), None, torch.float32)
