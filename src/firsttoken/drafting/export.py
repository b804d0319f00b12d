"""Drafts as plain checkpoints: what vLLM's `draft_model` and `eagle3`, and transformers, load."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firsttoken import models
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from firsttoken.speculate.draft_folder import (
    checkpoint_dtype,
    eagle3_config,
    load_feature_draft,
    write_json,
)
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, head_rows, start_from_target

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def export_layers(model_folder: Path, layers: int, out: Path) -> None:
    """The first `layers` layers of the model as a checkpoint of its own, untrained: the recipe that people copy."""
    target = _load(model_folder)
    count = target.config.num_layers
    if not 0 < layers <= count:
        raise ConfigError(f"--layers {layers}: {model_folder} has {count}")
    kept = {
        name: weight
        for name, weight in target.named_weights().items()
        if _layer_of(name) in range(-1, layers)
    }
    _write_checkpoint(model_folder, out, kept, {"num_hidden_layers": layers}, range(layers))


def save_shallow_draft(
    draft: Decoder,
    target: Decoder,
    shared: int,
    token_ids: torch.Tensor,
    fingerprint: str,
    model_folder: Path,
    out: Path,
    recipe: dict[str, Any],
) -> None:
    """A trained shallow draft as a plain checkpoint, with the whole vocabulary's head: shared layers, tuned layers,
    tuned norm. token_ids: the tokens it was trained to draft, kept beside it in draft_vocab.json; a checkpoint's
    readers refuse tensors that they do not know."""
    count, of_model = draft.config.num_layers, target.config.num_layers
    whole = copy.copy(draft)
    whole.lm_head = target.lm_head
    layers = [*range(shared), *range(of_model - (count - shared), of_model)]
    _write_checkpoint(model_folder, out, whole.named_weights(), {"num_hidden_layers": count}, layers)
    config = read_json(out, "config.json")
    config["firsttoken"] = {
        "kind": "shallow",
        "target": fingerprint,
        "shared_layers": shared,
        "tuned_layers": count - shared,
        "draft_vocab_size": len(token_ids),
    }
    write_json(out / "config.json", config)
    (out / "draft_vocab.json").write_text(json.dumps(token_ids.tolist()) + "\n")
    write_json(out / "recipe.json", recipe)


def export_eagle3(model_folder: Path, draft_folder: Path | None, out: Path, *, vocab: int = 12288) -> None:
    """A feature draft as an EAGLE-3 checkpoint that stands alone; without a draft an untrained one, to see whether a
    server loads it."""
    target = _load(model_folder)
    if draft_folder is not None:
        draft = load_feature_draft(draft_folder, target)
    else:
        config = FeatureConfig.for_target(target.config, draft_vocab_size=vocab)
        draft = FeatureDraft(config, target, torch.arange(config.draft_vocab_size))
        start_from_target(draft, target, seed=0)
    if len(draft.config.capture) != 3:
        raise ConfigError(
            f"{model_folder}: EAGLE-3 reads three layers, which a model of this depth does not have"
        )
    out.mkdir(parents=True, exist_ok=True)
    dtype = checkpoint_dtype(read_json(model_folder, "config.json"))
    weights = dict(draft.named_weights())
    ids = draft.token_ids
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = head_rows(target, ids)
    weights["embed_tokens.weight"] = target.embedding
    weights = {name: w.to(dtype).contiguous() for name, w in weights.items()}
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    described = {"kind": "feature", "target": models.fingerprint(model_folder), **draft.config.as_dict()}
    write_json(out / "config.json", {**eagle3_config(draft, target, dtype), "firsttoken": described})
    _copy_tokenizer(model_folder, out)


def _load(folder: Path) -> Decoder:
    """In float32: its weights stay rows on every CPU, and bfloat16 ones go through it unchanged."""
    return load_model(folder, torch.float32, torch.device("cpu"))


def _layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 for those of no layer."""
    parts = name.split(".")
    return int(parts[2]) if parts[1:2] == ["layers"] else -1


def _write_checkpoint(
    model_folder: Path, out: Path, weights: dict[str, torch.Tensor], changes: dict[str, Any], layers: Any
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {**read_json(model_folder, "config.json"), **changes}
    if types := config.get("layer_types"):
        config["layer_types"] = [types[i] for i in layers]
    dtype = checkpoint_dtype(config)
    write_json(out / "config.json", config)
    save_file(
        {name: w.detach().to("cpu", dtype).contiguous() for name, w in weights.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    _copy_tokenizer(model_folder, out)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
