"""The draft of row 3r: written once, by a process of its own, into FIRSTTOKEN_HOME."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firsttoken import models
from firsttoken.bench.raw_draft import make_raw_draft
from firsttoken.engine.config import ConfigError
from tests.drafting.folder import write_chat_model


def test_the_first_layers_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_HOME", str(tmp_path / "home"))
    model = write_chat_model(tmp_path / "model", layers=10)
    draft = make_raw_draft(str(model))
    assert draft is not None
    assert draft.parent == models.home() / "drafts"
    assert [f.name for f in draft.parent.iterdir()] == [draft.name]
    assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 8
    written = (draft / "model.safetensors").stat().st_mtime_ns
    assert make_raw_draft(str(model)) == draft
    assert (draft / "model.safetensors").stat().st_mtime_ns == written


def test_a_model_without_more_layers_has_no_such_row(tmp_path: Path) -> None:
    assert make_raw_draft(str(write_chat_model(tmp_path / "model", layers=8))) is None


def test_what_stopped_the_export_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "drafts").write_text("a file where the folder should be")
    monkeypatch.setenv("FIRSTTOKEN_HOME", str(home))
    model = write_chat_model(tmp_path / "model", layers=10)
    with pytest.raises(ConfigError, match=r"row 3r.*--raw-draft off"):
        make_raw_draft(str(model))
