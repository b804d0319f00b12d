"""A shallow draft's weights: the target's own first layers, shared, then a few tuned ones and a short head."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder, DecoderLayer
from firsttoken.engine.model.layers import Linear, RMSNorm
from firsttoken.speculate.feature_draft import head_rows, matrix_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShallowConfig:
    shared_layers: int
    """First layers of the target, with its weights and its KV cache."""
    tuned_layers: int
    """Layers of the draft's own behind them, started as copies of the target's last ones."""
    draft_vocab_size: int


def shallow_decoder(target: Decoder, config: ShallowConfig, token_ids: torch.Tensor) -> Decoder:
    """A decoder whose first layers ARE the target's and whose tuned layers, norm and head are new tensors, with the
    start values of training. token_ids: int64 [draft_vocab_size], the target's id of each row of the head."""
    shared, tuned = config.shared_layers, config.tuned_layers
    count = target.config.num_layers
    windows = target.config.layer_windows
    draft = copy.copy(target)
    draft.config = replace(
        target.config,
        num_layers=shared + tuned,
        layer_windows=windows[:shared] + windows[count - tuned :],
    )
    draft.layers = target.layers[:shared] + [_copy(layer) for layer in target.layers[count - tuned :]]
    draft.norm = _copy_norm(target.norm)
    draft.lm_head = Linear(head_rows(target, token_ids))
    return draft


def shape_of(config: ModelConfig, shallow: ShallowConfig) -> str:
    return f"{shallow.shared_layers} shared + {shallow.tuned_layers} tuned of {config.num_layers} layers"


def _copy(layer: DecoderLayer) -> DecoderLayer:
    return DecoderLayer(
        input_norm=_copy_norm(layer.input_norm),
        qkv=_copy_linear(layer.qkv),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.clone(),
        o=_copy_linear(layer.o),
        post_norm=_copy_norm(layer.post_norm),
        gate_up=_copy_linear(layer.gate_up),
        down=_copy_linear(layer.down),
    )


def _copy_linear(linear: Linear) -> Linear:
    return Linear(matrix_rows(linear).clone(), None if linear.bias is None else linear.bias.clone())


def _copy_norm(norm: RMSNorm) -> RMSNorm:
    return RMSNorm(norm.weight.clone(), norm.eps)
