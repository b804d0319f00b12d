"""How a shallow draft learns: its tuned layers over whole conversations, by the target's whole distribution."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from firsttoken.drafting.acceptance import AcceptanceFigures, acceptance
from firsttoken.drafting.feature import draw_anchors, soft_cross_entropy
from firsttoken.drafting.states import RowAttention, TargetStates
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.layers import Linear, RMSNorm
from firsttoken.speculate.feature_draft import rotate


def tuned_stream(draft: Decoder, states: TargetStates, rows: torch.Tensor, shared: int) -> torch.Tensor:
    """The draft's output stream [B, L, H] over `rows`, from the target's stream before layer `shared`.

    The arithmetic of `Decoder.run_layers`, without its writes in place: this one is differentiated.
    """
    config = draft.config
    stream = states.streams[rows]
    count, length, _ = stream.shape
    hidden = stream.flatten(0, 1)
    attend = RowAttention(count, length, config.layer_windows)
    table = draft.rotary.index_select(0, torch.arange(length, device=hidden.device).repeat(count))
    rotated = config.num_heads + config.num_kv_heads
    for i in range(shared, config.num_layers):
        layer = draft.layers[i]
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, config.head_dim)
        qk = qkv[:, :rotated]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        qk = rotate(qk, table)
        hidden = hidden + layer.o(
            attend(i, qk[:, : config.num_heads], qk[:, config.num_heads :], qkv[:, rotated:])
        )
        gate, up = layer.gate_up(layer.post_norm(hidden)).chunk(2, dim=-1)
        hidden = hidden + layer.down(F.silu(gate) * up)
    return hidden.view(count, length, -1)


def shallow_loss(
    draft: Decoder,
    states: TargetStates,
    rows: torch.Tensor,
    at: torch.Tensor,
    shared: int,
    hard_share: float,
) -> torch.Tensor:
    """The mean loss of predictions at slots `at` int64 [B, n] of `rows` int64 [B], where an answer's token follows."""
    stream = tuned_stream(draft, states, rows, shared)
    weight = states.answers[rows].roll(-1, 1).gather(1, at).flatten().float()
    b = torch.arange(len(rows), device=rows.device)[:, None]
    return soft_cross_entropy(
        draft.logits(draft.norm(stream[b, at].flatten(0, 1))),
        draft.lm_head(states.final[rows[:, None], at].flatten(0, 1)),
        states.log_total[rows[:, None], at].flatten(),
        weight / weight.sum().clamp(min=1),
        hard_share,
    )


@torch.no_grad()
def shallow_hits(
    draft: Decoder,
    states: TargetStates,
    shared: int,
    token_ids: torch.Tensor,
    depth: int,
    row_block: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `drafting.feature.chain_hits`: this draft's step j from slot p is its prediction at slot p + j."""
    n, length = states.tokens.shape
    hit = torch.zeros((n, length + depth), dtype=torch.bool)
    count = torch.zeros_like(hit)
    for start in range(0, n, row_block):
        rows = torch.arange(start, min(start + row_block, n), device=states.tokens.device)
        stream = draft.norm(tuned_stream(draft, states, rows, shared))
        best = torch.cat([draft.logits(part).argmax(-1) for part in stream.flatten(0, 1).split(4096)])
        guess = token_ids[best].view(len(rows), length)[:, :-1]
        answers = states.answers[rows][:, 1:]
        hit[rows.cpu(), : length - 1] = ((guess == states.tokens[rows][:, 1:]) & answers).cpu()
        count[rows.cpu(), : length - 1] = answers.cpu()
    count[:, 0] = False
    windows = [slice(j, j + length) for j in range(depth)]
    counts = torch.stack([count[:, w] for w in windows], -1).cumprod(-1).bool()
    return torch.stack([hit[:, w] for w in windows], -1) & counts, counts


class ShallowLearner:
    """A shallow draft in training (`train.Learner`)."""

    def __init__(
        self,
        draft: Decoder,
        shared: int,
        token_ids: torch.Tensor,
        states: TargetStates,
        held_out: TargetStates,
        *,
        rows: int = 64,
        tokens_per_row: int = 128,
        hard_share: float = 0.0,
        report_depth: int = 7,
    ) -> None:
        """shared: the draft's layers that are the target's; the states' one stream lies before the next."""
        self.draft, self.shared, self.token_ids = draft, shared, token_ids
        self.states, self.held_out = states, held_out
        self._rows, self._tokens_per_row, self._hard_share = rows, tokens_per_row, hard_share
        self.report_depth = report_depth

    def holders(self) -> dict[str, Linear | RMSNorm]:
        named = {
            f"layers.{i}.{part}": getattr(self.draft.layers[i], part)
            for i in range(self.shared, self.draft.config.num_layers)
            for part in ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")
        }
        return {**named, "norm": self.draft.norm}

    def num_rows(self) -> int:
        return len(self.states)

    def rows_per_step(self) -> int:
        return self._rows

    def draw(self, rows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return rows, draw_anchors(self.states.answers[rows], self._tokens_per_row, generator)

    def loss(self, *drawn: torch.Tensor) -> torch.Tensor:
        rows, at = drawn
        return shallow_loss(self.draft, self.states, rows, at, self.shared, self._hard_share)

    def figures(self) -> AcceptanceFigures:
        hits = shallow_hits(self.draft, self.held_out, self.shared, self.token_ids, self.report_depth)
        return acceptance(*hits)
