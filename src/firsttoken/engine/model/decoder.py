"""The decoder: token ids in, logits out, for Llama, Mistral, Qwen2 and Qwen3 alike.

All four are one stack: RMSNorm, attention with rotary positions and grouped queries, RMSNorm, SwiGLU. They differ
in what `ModelConfig` says: biases, norms on q and k, windows. The forward pass is plain torch, the same on CPU and
GPU; attention over the cache comes from outside (`attention/base.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import Attention
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.layers import Linear, RMSNorm, can_pack
from firsttoken.engine.model.rope import rotary_table


@dataclass(slots=True)
class DecoderLayer:
    """One layer. H hidden, I intermediate, A = num_heads * head_dim, K = num_kv_heads * head_dim."""

    input_norm: RMSNorm
    qkv: Linear
    """H → A + 2K: q, then k, then v."""
    qk_norm: torch.Tensor | None
    """[num_heads + num_kv_heads, head_dim]: the q norm's weight for each query head, then the k norm's."""
    o: Linear
    """A → H"""
    post_norm: RMSNorm
    gate_up: Linear
    """H → 2I: gate, then up."""
    down: Linear
    """I → H"""


class Decoder:
    """A model's weights and its forward pass.

    `layers`, `embedding`, `norm` and `lm_head` may be used by drafts that share them; nobody changes them once
    they are loaded. Weights have no gradients.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_positions: int | None = None,
    ) -> None:
        """Allocates the weights without a value: fill `named_weights`, then call `prepare`.

        `max_positions`: rows of the rotary table, if less than the model's context length is served.
        """
        self.config = config
        self.dtype = dtype
        self.device = device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows = config.num_heads * head_dim
        qkv_rows = q_rows + 2 * config.num_kv_heads * head_dim
        eps = config.rms_norm_eps
        self.embedding = empty(config.vocab_size, hidden)
        self.layers = [
            DecoderLayer(
                input_norm=RMSNorm(empty(hidden), eps),
                qkv=Linear(empty(qkv_rows, hidden), empty(qkv_rows) if config.qkv_bias else None),
                qk_norm=empty(config.num_heads + config.num_kv_heads, head_dim) if config.qk_norm else None,
                o=Linear(empty(hidden, q_rows), empty(hidden) if config.o_bias else None),
                post_norm=RMSNorm(empty(hidden), eps),
                gate_up=Linear(empty(2 * intermediate, hidden)),
                down=Linear(empty(hidden, intermediate)),
            )
            for _ in range(config.num_layers)
        ]
        self.norm = RMSNorm(empty(hidden), eps)
        self.lm_head = Linear(
            self.embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        )
        positions = min(max_positions or config.context_length, config.context_length)
        self.rotary = rotary_table(config.rope, head_dim, positions).to(device)

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
        """Random weights of a trained model's scale, for tests and benchmarks; the same for every dtype and
        device up to rounding."""
        decoder = cls(config, dtype, device)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in decoder.named_weights().items():
            value = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if name.endswith("norm.weight"):
                value = 1 + 0.1 * value
            elif weight.ndim == 2:
                value = value * weight.shape[1] ** -0.5
            weight.copy_(value)
        decoder.prepare()
        return decoder

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Every weight under its name in a Hugging Face checkpoint, as the view of the fused tensor that it is
        part of; only before `prepare`.

        q_norm and k_norm (Qwen3) are one row in a checkpoint; here they are [heads, head_dim] with equal rows.
        """
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not config.tie_word_embeddings:
            named["lm_head.weight"] = self.lm_head.weight
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            named[prefix + "input_layernorm.weight"] = layer.input_norm.weight
            named[prefix + "post_attention_layernorm.weight"] = layer.post_norm.weight
            named[prefix + "self_attn.o_proj.weight"] = layer.o.weight
            named[prefix + "mlp.down_proj.weight"] = layer.down.weight
            for part, rows in zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True):
                named[f"{prefix}mlp.{part}_proj.weight"] = rows
            for part, rows in zip("qkv", layer.qkv.weight.tensor_split((q, q + kv)), strict=True):
                named[f"{prefix}self_attn.{part}_proj.weight"] = rows
            if layer.qkv.bias is not None:
                for part, rows in zip("qkv", layer.qkv.bias.tensor_split((q, q + kv)), strict=True):
                    named[f"{prefix}self_attn.{part}_proj.bias"] = rows
            if layer.o.bias is not None:
                named[prefix + "self_attn.o_proj.bias"] = layer.o.bias
            if layer.qk_norm is not None:
                named[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[: config.num_heads]
                named[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[config.num_heads :]
        return named

    def prepare(self) -> None:
        """Brings loaded weights into the form that computes fastest, matrix by matrix, each in place of its rows.

        Where a tied head is packed, the embedding's rows stay beside it for look-ups: `vocab_size * hidden_size`
        elements more, for a head twice as fast.
        """
        packs = can_pack(self.dtype, self.device)
        for layer in self.layers:
            layer.input_norm.prepare()
            layer.post_norm.prepare()
            if packs:
                for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                    linear.pack()
        self.norm.prepare()
        if packs:
            self.lm_head.pack()

    @overload
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attention,
        *,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attention,
        *,
        capture: Sequence[int],
        last_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attention,
        *,
        capture: Sequence[int] = (),
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """token_ids, positions int64 [T] → the hidden state after the final norm [T, H], ready for `logits`.

        `last_rows` int64 [R]: only these rows are returned, [R, H], in that order. K and V of all rows still reach
        `attend`, but the last layer's output projection and MLP and the final norm compute these rows alone.
        `capture`: layer indices; if there are any, (hidden, captured) is returned, see `run_layers`.
        """
        captured: list[torch.Tensor] = []
        hidden = self.embed(token_ids)
        hidden = self.run_layers(
            hidden, positions, attend, capture=capture, captured=captured, last_rows=last_rows
        )
        hidden = self.norm(hidden)
        return (hidden, captured) if capture else hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] → [T, H], a new tensor."""
        return F.embedding(token_ids, self.embedding)

    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attention,
        start: int = 0,
        stop: int | None = None,
        *,
        capture: Sequence[int] = (),
        captured: list[torch.Tensor] | None = None,
        last_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layers start … stop − 1 over the residual stream `hidden` [T, H], which is overwritten; returns the
        stream after layer stop − 1, before any further norm. A shallow draft runs the first layers this way.

        `capture`: for each layer i that it names within the range, in ascending order, the stream BEFORE layer i is
        appended to `captured`, [T, H] of its own: the stream after layer i − 1, for 0 the embedding. It is what
        transformers calls `hidden_states[i]`.
        `last_rows`: as in `forward`, for layer stop − 1.
        """
        config = self.config
        num_heads, head_dim = config.num_heads, config.head_dim
        num_rotated = num_heads + config.num_kv_heads
        stop = config.num_layers if stop is None else stop
        cos, sin = self._rotation(positions)
        for i in range(start, stop):
            if i in capture and captured is not None:
                captured.append(hidden.clone())
            layer = self.layers[i]
            qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, head_dim)
            qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (head_dim,), None, config.rms_norm_eps) * layer.qk_norm
            qk = (qk * cos).addcmul_(qk.roll(head_dim // 2, -1), sin)
            attended = attend(i, qk[:, :num_heads], qk[:, num_heads:], v)
            if last_rows is not None and i == stop - 1:
                hidden, attended = hidden.index_select(0, last_rows), attended.index_select(0, last_rows)
            hidden.add_(layer.o(attended))
            gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, dim=-1)
            hidden.add_(layer.down(F.silu(gate).mul_(up)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm → [R, vocab_size] in the model's dtype."""
        return self.lm_head(hidden)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin [T, 1, head_dim], so that a head x turns into x · cos + roll(x, head_dim / 2) · sin:
        pairs are (i, i + head_dim / 2), and the first of a pair takes minus the sine."""
        cos, sin = self.rotary.index_select(0, positions).to(self.dtype).unbind(1)
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
