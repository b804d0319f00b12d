"""A draft as a folder: config.json, model.safetensors, and recipe.json beside them.

A feature draft's folder is an EAGLE-3 checkpoint without what it has from its target: the embedding, and the head's
rows where those are not tuned. `firsttoken draft export` adds them for other servers.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json
from firsttoken.engine.model.config import RopeConfig
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.layers import Linear, can_pack
from firsttoken.engine.model.loader import load_model
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, head_rows

FEATURE_ARCHITECTURE = "LlamaForCausalLMEagle3"


def save_feature_draft(
    draft: FeatureDraft,
    target: Decoder,
    model_folder: Path,
    fingerprint: str,
    folder: Path,
    recipe: dict[str, Any],
) -> None:
    """Writes `draft` (not prepared), in the dtype of its target's checkpoint. fingerprint: of the target's weights
    (`models.fingerprint`)."""
    dtype = checkpoint_dtype(read_json(model_folder, "config.json"))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().to("cpu", dtype).contiguous() for name, w in draft.named_weights().items()}
    ids = draft.token_ids.cpu()
    # EAGLE-3 stores the distance from a row of the head to its token.
    weights["d2t"] = ids - torch.arange(len(ids))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = eagle3_config(draft, target, dtype)
    config["firsttoken"] = {"kind": "feature", "target": fingerprint, **asdict(draft.config)}
    write_json(folder / "config.json", config)
    write_json(folder / "recipe.json", recipe)


def checkpoint_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that a config.json names, under either of its two keys."""
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return named if isinstance(named, torch.dtype) else torch.bfloat16


def eagle3_config(draft: FeatureDraft, target: Decoder, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json by which vLLM's `eagle3` builds the draft's layer. It reads a layer's input, as `capture`
    does, so the ids need no offset."""
    c, t = draft.config, target.config
    return {
        "architectures": [FEATURE_ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        **rope_fields(t.rope),
        "max_position_embeddings": t.max_position_embeddings,
        "vocab_size": t.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(c.capture),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The keys of a config.json that say how positions are rotated; the draft's layer rotates as its target does."""
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.type == "default":
        return fields
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.attention_factor,
        }
    return {**fields, "rope_scaling": scaling}


def load_feature_draft(folder: Path, target: Decoder) -> FeatureDraft:
    """The draft in `folder` in the target's dtype and on its device, not prepared. Raises ConfigError if it is no
    feature draft or does not fit the target's shape."""
    raw = read_json(folder, "config.json").get("firsttoken")
    if not isinstance(raw, dict) or raw.get("kind") != "feature":
        raise ConfigError(f"{folder} is not a feature draft: make one with `firsttoken draft train`")
    try:
        fields = {name: raw[name] for name in FeatureConfig.__dataclass_fields__}
    except KeyError as missing:
        raise ConfigError(
            f"{folder / 'config.json'} has no {missing} under firsttoken: train the draft again"
        ) from None
    config = FeatureConfig(**{**fields, "capture": tuple(fields["capture"])})
    t = target.config
    for name, theirs in (("hidden_size", t.hidden_size), ("head_dim", t.head_dim)):
        if getattr(config, name) != theirs:
            raise ConfigError(
                f"draft {folder} has {name} {getattr(config, name)}, the model {theirs}: it is of another model"
            )
    if config.capture[-1] >= t.num_layers:
        raise ConfigError(f"draft {folder} reads layer {config.capture[-1]} of a model with {t.num_layers}")
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder / 'model.safetensors'} can't be read ({error}): train the draft again"
        ) from None
    if "d2t" not in weights or len(weights["d2t"]) != config.draft_vocab_size:
        raise ConfigError(f"{folder / 'model.safetensors'} lacks a whole d2t: train the draft again")
    ids = weights.pop("d2t") + torch.arange(config.draft_vocab_size)
    if not 0 <= int(ids.min()) <= int(ids.max()) < t.vocab_size:
        raise ConfigError(
            f"draft {folder} drafts tokens outside the model's vocabulary: it is of another model"
        )
    draft = FeatureDraft(config, target, ids)
    for name, weight in draft.named_weights().items():
        if name not in weights or weights[name].shape != weight.shape:
            raise ConfigError(f"{folder / 'model.safetensors'} lacks a whole {name}: train the draft again")
        weight.copy_(weights[name])
    return draft


def load_shallow_draft(folder: Path, target: Decoder) -> tuple[Decoder, torch.Tensor, int]:
    """(decoder, token_ids, shared layers) of the shallow draft in `folder`, prepared: its first layers, embedding and
    head's rows ARE the target's. token_ids int64 [D]: the target's id of each row of the head."""
    own = read_json(folder, "config.json")["firsttoken"]
    shared = int(own["shared_layers"])
    decoder = load_model(folder, target.dtype, target.device, max_positions=len(target.rotary))
    if not 0 < shared < decoder.config.num_layers or decoder.config.hidden_size != target.config.hidden_size:
        raise ConfigError(f"draft {folder} does not have the model's shape: train it again")
    decoder.layers[:shared] = target.layers[:shared]
    decoder.embedding, decoder.rotary = target.embedding, target.rotary
    try:
        ids = torch.tensor(json.loads((folder / "draft_vocab.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        raise ConfigError(f"draft {folder} has no readable draft_vocab.json: train it again") from None
    if ids.ndim != 1 or not 0 <= int(ids.min()) <= int(ids.max()) < target.config.vocab_size:
        raise ConfigError(f"{folder / 'draft_vocab.json'} names tokens that the model does not have")
    ids = ids.to(target.device)
    decoder.lm_head = Linear(head_rows(target, ids))
    if can_pack(target.dtype, target.device):
        decoder.lm_head.pack()
    return decoder, ids, shared


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
