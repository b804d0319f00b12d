"""Which drafter the settings and the folders ask for, and what it takes of memory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.costs import CostModel
from firsttoken.engine.limits import DraftMemory
from firsttoken.engine.model.checkpoint import read_json, tensor_index, weight_files
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.loader import load_model
from firsttoken.engine.runner import Runner
from firsttoken.models import fingerprint
from firsttoken.speculate.decoder_drafter import SeparateDrafter, ShallowDrafter
from firsttoken.speculate.draft_folder import (
    FEATURE_ARCHITECTURE,
    load_feature_draft,
    load_shallow_draft,
)
from firsttoken.speculate.drafter import Drafter
from firsttoken.speculate.feature import FeatureDrafter
from firsttoken.speculate.find import own_draft, trained_for
from firsttoken.speculate.ngram import NgramDrafter
from firsttoken.speculate.same_tokenizer import check_same_tokenizer
from firsttoken.speculate.speculator import Speculator

_log = logging.getLogger(__name__)


def make_speculator(config: EngineConfig, costs: CostModel, runner: Runner) -> Speculator:
    """The drafter that the settings name; without a name the model's own draft, else n-grams.

    Raises ConfigError for a draft that does not exist or does not fit the model.
    """
    folder = _draft_folder(config)
    drafter: Drafter = NgramDrafter() if folder is None else _model_drafter(folder, config, runner)
    gamma = None if config.num_speculative_tokens == "auto" else config.num_speculative_tokens
    return Speculator(drafter, costs, gamma=gamma, always=config.speculation == "always")


def draft_memory(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> DraftMemory:
    """What the drafter of these settings takes beside the model. Raises ConfigError as `make_speculator` does."""
    if config.speculation == "off" or config.draft == "none":
        return DraftMemory()
    folder = _draft_folder(config)
    if folder is None:
        return DraftMemory()
    kind, own = _kind(folder, config)
    size = dtype.itemsize
    if kind == "feature":
        weights = sum(e.end - e.start for file in weight_files(folder) for e in tensor_index(file).values())
        head = int(own["draft_vocab_size"]) * model.hidden_size * size
        slot = 2 * int(own["num_kv_heads"]) * int(own["head_dim"]) * size
        return DraftMemory(weights + head, slot + -(-model.hidden_size * size // config.block_size))
    draft = ModelConfig.from_folder(folder)
    weights = draft.num_parameters() * size
    if kind == "separate":
        return DraftMemory(weights, draft.kv_bytes_per_token(size))
    tuned = draft.num_layers - int(own["shared_layers"])
    return DraftMemory(weights, draft.kv_bytes_per_token(size) * tuned // draft.num_layers)


def _draft_folder(config: EngineConfig) -> Path | None:
    """The draft's folder; None for n-grams."""
    if config.draft is None:
        return own_draft(Path(config.model)) if config.model else None
    if config.draft == "ngram":
        return None
    folder = Path(os.path.expanduser(config.draft))
    if not folder.is_dir():
        raise ConfigError(f"--draft {config.draft}: there is no such folder; give a draft's, ngram or none")
    return folder


def _kind(folder: Path, config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """(feature | shallow | separate, what `draft train` wrote of it)"""
    raw = read_json(folder, "config.json")
    own = raw.get("firsttoken")
    own = own if isinstance(own, dict) else {}
    if own.get("kind") == "feature":
        return "feature", own
    architecture = (raw.get("architectures") or [None])[0]
    if architecture is None:
        raise ConfigError(f"--draft {folder}: its config.json names no architecture; give a draft's folder")
    if architecture == FEATURE_ARCHITECTURE or "eagle" in str(architecture).lower():
        raise ConfigError(
            f"--draft {folder}: {architecture} drafts of other projects can't be used; make one with"
            " `firsttoken draft train`, or give a plain checkpoint with the model's tokenizer"
        )
    if own.get("kind") == "shallow" and _of_this_model(folder, config):
        return "shallow", own
    return "separate", own


def _of_this_model(folder: Path, config: EngineConfig) -> bool:
    return not config.model or trained_for(folder) == fingerprint(Path(config.model))


def _model_drafter(folder: Path, config: EngineConfig, runner: Runner) -> Drafter:
    kind, own = _kind(folder, config)
    target, cache = runner.model, runner.cache
    num_layers = target.config.num_layers
    if own.get("target") and not _of_this_model(folder, config):
        _log.warning(
            "the draft %s was trained for other weights than %s: drafts will be rejected more often",
            folder,
            config.model,
        )
    name = f"{kind} draft {folder.name}"
    if kind == "feature":
        draft = load_feature_draft(folder, target)
        draft.prepare()
        return FeatureDrafter(
            draft,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            num_layers=num_layers,
            name=name,
        )
    if kind == "shallow":
        decoder, token_ids, shared = load_shallow_draft(folder, target)
        return ShallowDrafter(decoder, cache, token_ids, shared=shared, num_layers=num_layers, name=name)
    if config.model:
        check_same_tokenizer(Path(config.model), folder)
    try:
        decoder = load_model(folder, target.dtype, target.device, max_positions=len(target.rotary))
    except ConfigError as error:
        raise ConfigError(f"--draft {folder} can't be used: {error}") from None
    return SeparateDrafter(
        decoder, cache, vocab_size=target.config.vocab_size, num_layers=num_layers, name=name
    )
