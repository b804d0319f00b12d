"""Where a model's own draft lies: made by the user, or shipped with the package. No torch."""

from __future__ import annotations

from pathlib import Path

from firsttoken import models
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json

SHIPPED = Path(__file__).parents[1] / "data" / "drafts"


def draft_folder_of(model_folder: Path) -> Path:
    """Where `firsttoken draft train` puts the draft of these weights if nobody says otherwise."""
    return models.home() / "drafts" / models.fingerprint(model_folder)


def own_draft(model_folder: Path) -> Path | None:
    """The draft made here for these weights, else the one shipped for them, else None."""
    fingerprint = models.fingerprint(model_folder)
    stored = models.home() / "drafts" / fingerprint
    candidates = [stored, *sorted(SHIPPED.glob("*"))]
    for folder in candidates:
        if (folder / "config.json").is_file() and trained_for(folder) == fingerprint:
            return folder
    return None


def trained_for(draft: Path) -> str | None:
    """Fingerprint of the weights that a draft was trained for; None if it does not say or is no draft."""
    try:
        raw = read_json(draft, "config.json").get("firsttoken")
    except ConfigError:
        return None
    target = raw.get("target") if isinstance(raw, dict) else None
    return target if isinstance(target, str) else None
