"""Whether a draft fits a model: what would stop a server, or make every draft be rejected without a word."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from firsttoken import models
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json, tensor_index, weight_files
from firsttoken.speculate.draft_folder import FEATURE_ARCHITECTURE
from firsttoken.speculate.same_tokenizer import first_difference, token_ids


@dataclass(frozen=True)
class Finding:
    severity: Literal["ok", "warning", "error"]
    """error: it cannot work, or no draft would stand."""
    text: str


def check_draft(model: Path, draft: Path) -> list[Finding]:
    """One finding a subject. Raises ConfigError if a folder is no model or draft at all."""
    m, d = read_json(model, "config.json"), read_json(draft, "config.json")
    own: dict[str, Any] = d.get("firsttoken") or {}
    kind = own.get("kind") or (
        "eagle3" if FEATURE_ARCHITECTURE in (d.get("architectures") or []) else "separate"
    )
    findings = [Finding("ok", f"kind: {kind}")]
    findings.append(_target(model, own, kind))
    findings.append(_tokenizers(model, draft, shares=kind == "feature"))
    findings.append(_vocabulary(model, m, d))
    findings.append(_depth(m, d, kind))
    findings.append(_context(m, d))
    findings.append(_dtype(m, d))
    findings.append(_quantisation(d))
    findings.append(_weights(draft))
    if kind in ("feature", "eagle3"):
        findings.append(_states(m, d))
    return findings


def _target(model: Path, own: dict[str, Any], kind: str) -> Finding:
    trained_for = own.get("target")
    if trained_for is None:
        severity: Literal["ok", "warning"] = "warning" if kind != "separate" else "ok"
        return Finding(severity, "target: the draft does not say which weights it was trained for")
    if trained_for != models.fingerprint(model):
        return Finding(
            "warning",
            "target: trained for other weights than this model's (a fine-tune, or another version): drafts will be"
            " rejected more often; train it again with `firsttoken draft train`",
        )
    return Finding("ok", "target: trained for exactly these weights")


def _tokenizers(model: Path, draft: Path, *, shares: bool) -> Finding:
    theirs = draft / "tokenizer.json"
    if not theirs.is_file():
        if shares:
            return Finding("ok", "tokenizer: the model's own")
        return Finding("warning", "tokenizer: the draft has none to compare; it must be the model's own")
    tokens = token_ids(model / "tokenizer.json")
    if difference := first_difference(tokens, token_ids(theirs)):
        return Finding("error", f"tokenizer: {difference}")
    return Finding("ok", f"tokenizer: the same {len(tokens):,} tokens")


def _vocabulary(model: Path, m: dict[str, Any], d: dict[str, Any]) -> Finding:
    ours, theirs = int(m.get("vocab_size") or 0), int(d.get("vocab_size") or 0)
    if ours == theirs:
        return Finding("ok", f"vocabulary: {ours:,} rows in both")
    last = max(token_ids(model / "tokenizer.json").values())
    if theirs <= last:
        return Finding(
            "error", f"vocabulary: {theirs:,} rows in the draft, but the tokenizer's ids go up to {last:,}"
        )
    return Finding(
        "warning",
        f"vocabulary: {ours:,} rows in the model, {theirs:,} in the draft; that is padding, which firsttoken takes, but"
        " some servers want the two numbers equal",
    )


def _depth(m: dict[str, Any], d: dict[str, Any], kind: str) -> Finding:
    layers, depth = int(m["num_hidden_layers"]), int(d.get("num_hidden_layers", 1))
    share = depth / layers
    if kind == "separate" and share >= 0.2:
        gamma = 5
        best = (gamma + 1) / (gamma * share + 1)
        return Finding(
            "warning",
            f"depth: {depth} layers against {layers}: with γ {gamma} at most {best:.2f}x faster even if every draft"
            " stood",
        )
    return Finding("ok", f"depth: {depth} of {layers} layers")


def _context(m: dict[str, Any], d: dict[str, Any]) -> Finding:
    ours, theirs = int(m["max_position_embeddings"]), int(d.get("max_position_embeddings", 0))
    if theirs and theirs < ours:
        return Finding(
            "error",
            f"context: the draft's {theirs:,} tokens end before the model's {ours:,}: lower --max-model-len",
        )
    return Finding("ok", f"context: {theirs or ours:,} tokens")


def _dtype(m: dict[str, Any], d: dict[str, Any]) -> Finding:
    ours, theirs = (c.get("dtype") or c.get("torch_dtype") for c in (m, d))
    if ours != theirs:
        return Finding("warning", f"dtype: {theirs} in the draft, {ours} in the model: it will be converted")
    return Finding("ok", f"dtype: {theirs}")


def _quantisation(d: dict[str, Any]) -> Finding:
    if method := (d.get("quantization_config") or {}).get("quant_method"):
        return Finding(
            "warning",
            f"quantisation: the draft is quantised ({method}): firsttoken does not load it, and some servers accept"
            " no draft of such a one, silently; give it in bfloat16",
        )
    return Finding("ok", "quantisation: none")


def _weights(draft: Path) -> Finding:
    """Whether the files are there and whole, by their headers."""
    try:
        tensors = sum(len(tensor_index(file)) for file in weight_files(draft))
    except ConfigError as error:
        return Finding("error", f"weights: {error}")
    return Finding("ok", f"weights: {tensors} tensors, none cut short")


def _states(m: dict[str, Any], d: dict[str, Any]) -> Finding:
    ids, layers = d.get("eagle_aux_hidden_state_layer_ids"), int(m["num_hidden_layers"])
    if d.get("hidden_size") != m.get("hidden_size"):
        return Finding(
            "error", f"states: hidden size {d.get('hidden_size')}, the model's is {m.get('hidden_size')}"
        )
    if not ids:
        return Finding("warning", "states: the draft does not say which layers it reads")
    if max(ids) >= layers:
        return Finding("error", f"states: reads the input of layer {max(ids)}, the model has {layers}")
    return Finding("ok", f"states: reads the inputs of layers {', '.join(map(str, ids))}")
