"""The decoder: token ids in, logits out, for Llama, Mistral, Qwen2 and Qwen3 alike.

All four are one stack: RMSNorm, attention with rotary positions and grouped queries, RMSNorm, SwiGLU. They differ
in what `ModelConfig` says: biases, norms on q and k, windows. The forward pass is plain torch, the same on CPU and
GPU; attention over the cache comes from outside (`attention/base.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.engine.attention.base import Attention
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.rope import rotary_table


@dataclass(slots=True)
class LayerWeights:
    """One layer. H hidden, I intermediate, A = num_heads * head_dim, K = num_kv_heads * head_dim."""

    input_norm: torch.Tensor
    """[H]"""
    qkv: torch.Tensor
    """[A + 2K, H]: rows of q, then k, then v."""
    qkv_bias: torch.Tensor | None
    """[A + 2K]"""
    qk_norm: torch.Tensor | None
    """[num_heads + num_kv_heads, head_dim]: the q norm's weight for each query head, the k norm's for each key head."""
    o: torch.Tensor
    """[H, A]"""
    o_bias: torch.Tensor | None
    """[H]"""
    post_norm: torch.Tensor
    """[H]"""
    gate_up: torch.Tensor
    """[2I, H]: rows of gate, then up."""
    down: torch.Tensor
    """[H, I]"""


class Decoder:
    """A model's weights and its forward pass.

    Weights are plain tensors without gradients. `layers[i]`, `embedding`, `norm` and `lm_head` may be read by drafts
    that share them; nobody writes them after loading.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_positions: int | None = None,
    ) -> None:
        """Allocates the weights without a value; `named_weights` is where a loader puts them.

        `max_positions`: rows of the rotary table, if the engine serves less than the model's context length.
        """
        self.config = config
        self.dtype = dtype
        self.device = device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, qkv_rows = (
            config.num_heads * head_dim,
            (config.num_heads + 2 * config.num_kv_heads) * head_dim,
        )
        self.embedding = empty(config.vocab_size, hidden)
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(qkv_rows, hidden),
                qkv_bias=empty(qkv_rows) if config.qkv_bias else None,
                qk_norm=empty(config.num_heads + config.num_kv_heads, head_dim) if config.qk_norm else None,
                o=empty(hidden, q_rows),
                o_bias=empty(hidden) if config.o_bias else None,
                post_norm=empty(hidden),
                gate_up=empty(2 * intermediate, hidden),
                down=empty(hidden, intermediate),
            )
            for _ in range(config.num_layers)
        ]
        self.norm = empty(hidden)
        self.lm_head = self.embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        positions = min(max_positions or config.context_length, config.context_length)
        self.rotary = rotary_table(config.rope, head_dim, positions).to(device)

    @classmethod
    def random(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
        """Random weights of a trained model's scale, for tests and benchmarks; the same for every dtype and device
        up to rounding."""
        decoder = cls(config, dtype, device)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in decoder.named_weights().items():
            value = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if "norm" in name:
                value = 1 + 0.1 * value
            elif weight.ndim == 2:
                value = value * weight.shape[1] ** -0.5
            weight.copy_(value)
        return decoder

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Every weight under its name in a Hugging Face checkpoint, as the view of the fused tensor it lives in.

        Qwen3's q_norm and k_norm are stored once per head; their view is [heads, head_dim] with equal rows.
        """
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not config.tie_word_embeddings:
            named["lm_head.weight"] = self.lm_head
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            named[prefix + "input_layernorm.weight"] = layer.input_norm
            named[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            named[prefix + "self_attn.o_proj.weight"] = layer.o
            named[prefix + "mlp.down_proj.weight"] = layer.down
            for part, rows in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
                named[f"{prefix}mlp.{part}_proj.weight"] = rows
            for part, rows in zip("qkv", layer.qkv.split((q, kv, kv)), strict=True):
                named[f"{prefix}self_attn.{part}_proj.weight"] = rows
            if layer.qkv_bias is not None:
                for part, rows in zip("qkv", layer.qkv_bias.split((q, kv, kv)), strict=True):
                    named[f"{prefix}self_attn.{part}_proj.bias"] = rows
            if layer.o_bias is not None:
                named[prefix + "self_attn.o_proj.bias"] = layer.o_bias
            if layer.qk_norm is not None:
                named[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[: config.num_heads]
                named[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[config.num_heads :]
        return named

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

        `last_rows` int64 [R]: only these rows are returned, [R, H], in that order; K and V of all rows still reach
        `attend`, but the last layer's output projection and MLP and the final norm compute these rows alone.
        `capture`: see `run_layers`; if it isn't empty, (hidden, captured) is returned.
        """
        captured: list[torch.Tensor] = []
        hidden = self.run_layers(
            self.embed(token_ids), positions, attend, capture=capture, captured=captured, last_rows=last_rows
        )
        hidden = self.final_norm(hidden)
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
        """Layers start … stop − 1 over the residual stream `hidden` [T, H], which is overwritten; returns the stream
        after layer stop − 1, before any further norm. A shallow draft runs the first layers this way.

        `capture`: for each i of it in turn that lies in [start, stop), the stream BEFORE layer i (which is the stream
        after layer i − 1; 0 is the embedding) is appended to `captured` as a tensor of its own [T, H]. This is
        transformers' `hidden_states[i]`.
        `last_rows`: as in `forward`, for layer stop − 1.
        """
        config = self.config
        num_heads, num_rotated, head_dim = (
            config.num_heads,
            config.num_heads + config.num_kv_heads,
            config.head_dim,
        )
        eps = config.rms_norm_eps
        stop = config.num_layers if stop is None else stop
        cos, sin = self.rotary.index_select(0, positions).to(hidden.dtype).unsqueeze(1).unbind(2)
        for i in range(start, stop):
            if i in capture:
                assert captured is not None
                captured.append(hidden.clone())
            layer = self.layers[i]
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.input_norm, eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, head_dim)
            qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (head_dim,), None, eps) * layer.qk_norm
            first, second = qk.chunk(2, dim=-1)
            qk = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            attended = attend(i, qk[:, :num_heads], qk[:, num_heads:], v)
            if last_rows is not None and i == stop - 1:
                hidden, attended = hidden.index_select(0, last_rows), attended.index_select(0, last_rows)
            hidden += F.linear(attended, layer.o, layer.o_bias)
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.post_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden += F.linear(F.silu(gate).mul_(up), layer.down)
        return hidden

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm between the last layer and the head: [R, H] → [R, H]."""
        return F.rms_norm(hidden, (self.config.hidden_size,), self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm → [R, vocab_size] in the model's dtype."""
        return F.linear(hidden, self.lm_head)
