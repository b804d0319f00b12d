"""A feature draft's weights and arithmetic: one layer over the last token and the target's own hidden states.

The layout is EAGLE-3's (Li et al., 2025), as vLLM's `eagle3` loads it. Slot p of the draft holds token p and the
target's state of token p - 1: three residual streams of the target (low, middle, high), fused by `fc` into one
hidden vector. One decoder layer attends over [norm(embedding), norm(hidden)] of all slots up to p and predicts
token p + 1. Further tokens are drafted by feeding the layer its own output stream as the next slot's hidden vector.
Slot 0 does not exist: no state lies before the first token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.layers import Linear, RMSNorm, can_pack


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """The draft's shape. H hidden size of target and draft alike."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    capture: tuple[int, ...]
    """Layers of the target before which its residual stream is read, ascending."""
    draft_vocab_size: int
    """Tokens that can be drafted: the head's rows."""
    tuned_head: bool = False
    """The head's rows are the draft's own; else they are the target's, and a draft's folder does not hold them."""

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        draft_vocab_size: int,
        intermediate_size: int | None = None,
        tuned_head: bool = False,
    ) -> FeatureConfig:
        """A draft of the shape of one of the target's layers, with streams from before layers 3, L/2 and L - 1."""
        last = target.num_layers - 1
        return cls(
            hidden_size=target.hidden_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate_size=intermediate_size or target.intermediate_size,
            rms_norm_eps=target.rms_norm_eps,
            capture=tuple(sorted({min(3, last), target.num_layers // 2, last})),
            draft_vocab_size=min(draft_vocab_size, target.vocab_size),
            tuned_head=tuned_head,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FeatureDraft:
    """The weights, and the steps of the forward pass; whoever uses it brings the attention.

    Embedding, rotary table and (unless tuned) the head's rows are the target's.
    """

    def __init__(self, config: FeatureConfig, target: Decoder, token_ids: torch.Tensor) -> None:
        """Allocates the weights without a value: fill `named_weights`.

        token_ids: int64 [draft_vocab_size], ascending: the target's id of each row of the head.
        """
        self.config = config
        self.token_ids = token_ids.to(target.device)
        self.embedding = target.embedding
        self.rotary = target.rotary
        self.dtype, self.device = target.dtype, target.device
        self._rotations: tuple[torch.Tensor, torch.Tensor] | None = None
        """Once prepared: cos and signed sin of every position, [positions, 1, head_dim]; looked up, not built."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        q_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=target.dtype, device=target.device)

        self.fc = Linear(empty(hidden, len(config.capture) * hidden))
        self.embedding_norm = RMSNorm(empty(hidden), eps)
        self.hidden_norm = RMSNorm(empty(hidden), eps)
        self.qkv = Linear(empty(q_rows + 2 * kv_rows, 2 * hidden))
        self.o = Linear(empty(hidden, q_rows))
        self.post_norm = RMSNorm(empty(hidden), eps)
        self.gate_up = Linear(empty(2 * config.intermediate_size, hidden))
        self.down = Linear(empty(hidden, config.intermediate_size))
        self.norm = RMSNorm(empty(hidden), eps)
        rows = head_rows(target, self.token_ids)
        self.head = Linear(empty(*rows.shape).copy_(rows) if config.tuned_head else rows)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Every weight that a draft's folder holds, under its name in an EAGLE-3 checkpoint; only before `prepare`."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        named = {
            "fc.weight": self.fc.weight,
            "midlayer.input_layernorm.weight": self.embedding_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            "midlayer.self_attn.o_proj.weight": self.o.weight,
            "midlayer.post_attention_layernorm.weight": self.post_norm.weight,
            "midlayer.mlp.down_proj.weight": self.down.weight,
            "norm.weight": self.norm.weight,
        }
        for part, rows in zip("qkv", self.qkv.weight.tensor_split((q, q + kv)), strict=True):
            named[f"midlayer.self_attn.{part}_proj.weight"] = rows
        for part, rows in zip(("gate", "up"), self.gate_up.weight.chunk(2), strict=True):
            named[f"midlayer.mlp.{part}_proj.weight"] = rows
        if c.tuned_head:
            named["lm_head.weight"] = self.head.weight
        return named

    def linears(self) -> dict[str, Linear]:
        """The matrices that training changes."""
        names = ("fc", "qkv", "o", "gate_up", "down") + (("head",) if self.config.tuned_head else ())
        return {name: getattr(self, name) for name in names}

    def norms(self) -> dict[str, RMSNorm]:
        names = ("embedding_norm", "hidden_norm", "post_norm", "norm")
        return {name: getattr(self, name) for name in names}

    def prepare(self) -> None:
        """Brings loaded weights into the form that computes fastest; see `Decoder.prepare`."""
        for norm in self.norms().values():
            norm.prepare()
        self._rotations = rotations(self.rotary.to(self.dtype))
        if can_pack(self.dtype, self.device):
            for linear in (self.fc, self.qkv, self.o, self.gate_up, self.down, self.head):
                linear.pack()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's streams side by side, [..., C * H] → hidden vectors [..., H]."""
        return self.fc(states)

    def project(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots (token_ids int64 [T], hidden [T, H]) at positions int64 [T] → q [T, num_heads, head_dim] and
        k, v [T, num_kv_heads, head_dim], rotated."""
        c = self.config
        embedded = self.embedding_norm(F.embedding(token_ids, self.embedding))
        x = torch.cat((embedded, self.hidden_norm(hidden)), dim=-1)
        qkv = self.qkv(x).view(len(hidden), -1, c.head_dim)
        rotated = c.num_heads + c.num_kv_heads
        if self._rotations is None:
            qk = rotate(qkv[:, :rotated], self.rotary.index_select(0, positions))
        else:
            cos, sin = self._rotations
            qk = qkv[:, :rotated]
            turned = qk.roll(c.head_dim // 2, -1)
            qk = (qk * cos.index_select(0, positions)).addcmul_(turned, sin.index_select(0, positions))
        return qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:]

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """After attention [T, num_heads * head_dim]: the layer's output stream [T, H], before the final norm."""
        hidden = hidden + self.o(attended)
        gate, up = self.gate_up(self.post_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """[T, H] → [T, draft_vocab_size]; row i of the head is token `token_ids[i]`."""
        return self.head(self.norm(stream))


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., 2021) for heads [T, heads, d], with rows [T, 2, d / 2] of the rotary table."""
    cos, sin = rotations(table.to(x.dtype))
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def rotations(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, 2, d / 2] of a rotary table → cos and signed sin [T, 1, d], see `rotate`."""
    cos, sin = table.unbind(1)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def head_rows(target: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """The rows of the target's head for these tokens, [n, H]."""
    if target.config.tie_word_embeddings:
        return target.embedding.index_select(0, token_ids)
    return matrix_rows(target.lm_head).index_select(0, token_ids)


def start_from_target(draft: FeatureDraft, target: Decoder, seed: int) -> None:
    """Start values: the layer is a copy of the target's last one, and the new inputs pass the high stream through.

    So before any training the layer continues the target's last stream by the target's own means, with the last
    token and the lower streams as small perturbations.
    """
    c = draft.config
    generator = torch.Generator().manual_seed(seed)
    hidden = c.hidden_size
    last = len(target.layers) - 1
    source = target.layers[last]

    def noise(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).to(draft.device, draft.dtype)

    with torch.no_grad():
        draft.fc.weight.copy_(noise(hidden, len(c.capture) * hidden, scale=0.1 * hidden**-0.5))
        draft.fc.weight[:, -hidden:] += torch.eye(hidden, device=draft.device, dtype=draft.dtype)
        draft.qkv.weight.copy_(noise(*draft.qkv.weight.shape, scale=0.1 * hidden**-0.5))
        draft.qkv.weight[:, hidden:] += matrix_rows(source.qkv)
        draft.o.weight.copy_(matrix_rows(source.o))
        width = target.config.intermediate_size
        gate, up = matrix_rows(source.gate_up).chunk(2)
        if c.intermediate_size != width:
            draft.gate_up.weight.copy_(noise(*draft.gate_up.weight.shape, scale=hidden**-0.5))
            draft.down.weight.zero_()
        kept = min(width, c.intermediate_size)
        draft.gate_up.weight[:kept].copy_(gate[:kept])
        draft.gate_up.weight[c.intermediate_size : c.intermediate_size + kept].copy_(up[:kept])
        draft.down.weight[:, :kept].copy_(matrix_rows(source.down)[:, :kept])
        draft.embedding_norm.weight.fill_(1)
        draft.hidden_norm.weight.copy_(source.input_norm.weight)
        draft.post_norm.weight.copy_(source.post_norm.weight)
        draft.norm.weight.copy_(target.norm.weight)


def matrix_rows(linear: Linear) -> torch.Tensor:
    """The matrix [out, in] as rows, also where it is packed."""
    weight = linear.weight
    return weight.to_dense() if weight.layout == torch._mkldnn else weight  # type: ignore[attr-defined]
