"""`firsttoken draft check`: every way in which a draft can be of another model is named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from firsttoken import models
from firsttoken.drafting.check import check_draft
from firsttoken.speculate.find import SHIPPED


@pytest.fixture
def folders(tmp_path):
    model, draft = tmp_path / "model", tmp_path / "draft"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 64,
        "vocab_size": 4,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>", "id": 2}]}
    for folder, layers in ((model, 30), (draft, 4)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        save_file({"model.norm.weight": np.ones(64, dtype=np.float32)}, folder / "model.safetensors")
    return model, draft


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def found(model, draft, subject):
    (finding,) = [f for f in check_draft(model, draft) if f.text.startswith(subject + ":")]
    return finding


def test_a_draft_that_fits(folders):
    assert {f.severity for f in check_draft(*folders)} == {"ok"}


def test_one_token_with_another_id_is_named(folders):
    model, draft = folders
    change(draft / "tokenizer.json", model={"vocab": {"a": 1, "b": 0}})
    finding = found(model, draft, "tokenizer")
    assert finding.severity == "error"
    assert "'a' is id 0 in the model and id 1 in the draft" in finding.text


@pytest.mark.parametrize(
    ("changes", "subject", "severity", "says"),
    [
        ({"max_position_embeddings": 512}, "context", "error", "512"),
        ({"vocab_size": 8}, "vocabulary", "warning", "padding"),
        ({"vocab_size": 2}, "vocabulary", "error", "go up to 2"),
        ({"num_hidden_layers": 8}, "depth", "warning", "2.57x"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation", "warning", "awq"),
        ({"torch_dtype": "float16"}, "dtype", "warning", "float16"),
    ],
)
def test_what_differs_is_said(folders, changes, subject, severity, says):
    model, draft = folders
    change(draft / "config.json", **changes)
    finding = found(model, draft, subject)
    assert finding.severity == severity
    assert says in finding.text


def test_weights_that_are_cut_short_or_missing_are_found(folders):
    model, draft = folders
    whole = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert found(model, draft, "weights").severity == "error"
    (draft / "model.safetensors").unlink()
    assert found(model, draft, "weights").severity == "error"


def test_the_shipped_draft_is_of_the_built_in_model_and_small():
    folder = SHIPPED / "smollm2-135m"
    config = json.loads((folder / "config.json").read_text())
    recipe = json.loads((folder / "recipe.json").read_text())
    assert config["firsttoken"]["target"] == recipe["target"]
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 24e6
    assert recipe["tokens_per_cycle"][4] >= 3.4
    assert "smollm2-135m" in models.BUILT_IN


def test_a_draft_of_other_weights_is_a_warning(folders, tmp_path):
    model, _ = folders
    draft = tmp_path / "feature"
    shutil.copytree(SHIPPED / "smollm2-135m", draft)
    finding = found(model, draft, "target")
    assert finding.severity == "warning"
    assert "train it again" in finding.text
    assert found(model, draft, "states").severity == "error"
