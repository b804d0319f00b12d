"""How a feature draft learns: on chains of its own output, from many places of a conversation at once.

A chain starts at an anchor, a slot whose token and state are the target's. Step 0 predicts the token after the
anchor; step j runs on the stream that step j - 1 put out, as when drafting. It is fed the text's token, not its
own: while the two differ a draft is rejected anyway. Each step's loss is the cross-entropy to the target's whole
distribution (its KL divergence up to a constant), summed over the tokens that the head has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from firsttoken.drafting.acceptance import AcceptanceFigures, acceptance
from firsttoken.drafting.states import TargetStates
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.layers import Linear, RMSNorm
from firsttoken.speculate.feature_draft import FeatureDraft, head_rows


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    rows: int = 64
    """Conversations in a training step."""
    anchors: int = 128
    """Chains that start in each."""
    depth: int = 5
    """Steps of a chain."""
    decay: float = 0.85
    """A step's weight over that of the step before."""
    hard_share: float = 0.0
    """Share of the loss that is the cross-entropy to the target's likeliest token alone."""


def _loss_and_gradient_eagerly(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_total: torch.Tensor,
    weight: torch.Tensor,
    hard_share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    p = (target.float() - log_total[:, None]).exp()
    if hard_share:
        best = target == target.amax(-1, keepdim=True)
        p = p * (1 - hard_share) + hard_share * best
    log_q = logits.float().log_softmax(-1)
    loss = -((p * log_q).sum(-1) * weight).sum()
    # d/dlogits = Σp · q − p
    gradient = (log_q.exp() * p.sum(-1, keepdim=True) - p) * weight[:, None]
    return loss, gradient.to(logits.dtype)


_compiled: list[Any] = []


def _loss_and_gradient(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU as one fused kernel: a dozen passes over [R, D] in float32 are most of a training step else."""
    if logits.device.type != "cuda":
        return _loss_and_gradient_eagerly(logits, *rest)
    if not _compiled:
        _compiled.append(torch.compile(_loss_and_gradient_eagerly, dynamic=False))
    result: tuple[torch.Tensor, torch.Tensor] = _compiled[0](logits, *rest)
    return result


class _SoftCrossEntropy(torch.autograd.Function):
    """Σ weight · −Σ_v p(v) log q(v) for logits [R, D]; p sums to the head's share of the vocabulary's mass.

    The gradient is computed with the loss: kept for later, it is one tensor in the logits' own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        log_total: torch.Tensor,
        weight: torch.Tensor,
        hard_share: float,
    ) -> torch.Tensor:
        loss, gradient = _loss_and_gradient(logits, target, log_total, weight, hard_share)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def soft_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_total: torch.Tensor,
    weight: torch.Tensor,
    hard_share: float,
) -> torch.Tensor:
    """logits, target [R, D] of draft and target over the head's tokens; log_total [R]: log-sum-exp of the target's
    logits over its whole vocabulary; weight [R]. `hard_share` of each row goes to the target's likeliest token."""
    loss: torch.Tensor = _SoftCrossEntropy.apply(logits, target, log_total, weight, hard_share)  # type: ignore[no-untyped-call]
    return loss


def draw_anchors(answers: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` anchors of each row: slots p >= 1 whose next token is of an answer. answers bool [B, L] → int64
    [B, count]. Rows with fewer repeat slots that `chain` then gives no weight."""
    keys = torch.rand(answers.shape, generator=generator, device=answers.device)
    usable = answers.roll(-1, 1)
    usable[:, -1] = False
    usable[:, 0] = False
    return keys.masked_fill_(~usable, -1).topk(min(count, answers.shape[1]), dim=1).indices.clamp(min=1)


def chain_loss(
    draft: FeatureDraft,
    target_head: Linear,
    states: TargetStates,
    rows: torch.Tensor,
    anchors: torch.Tensor,
    config: ChainConfig,
) -> torch.Tensor:
    """The mean loss of chains at `anchors` int64 [B, n] in `rows` int64 [B] of the corpus. target_head: the target's
    rows of the tokens that the draft has."""
    loss = torch.zeros((), device=anchors.device)
    scale = 0.0
    for j, stream, at, valid in _chain(draft, states, rows, anchors, config.depth):
        step_weight = config.decay**j
        weight = valid.flatten().float()
        weight = weight * (step_weight / weight.sum().clamp(min=1))
        final = states.final[rows[:, None], at].flatten(0, 1)
        loss = loss + soft_cross_entropy(
            draft.logits(stream),
            target_head(final),
            states.log_total[rows[:, None], at].flatten(),
            weight,
            config.hard_share,
        )
        scale += step_weight
    return loss / scale


@torch.no_grad()
def chain_hits(
    draft: FeatureDraft, states: TargetStates, depth: int, *, row_block: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a chain from every slot: whether step j's likeliest token is the text's, and whether it counts (its token
    is of the same answer). Two bool [N, L, depth]; slots 0 and L - 1 count nothing."""
    n, length = states.tokens.shape
    hits = torch.zeros((n, length, depth), dtype=torch.bool)
    counts = torch.zeros_like(hits)
    anchors = torch.arange(1, length - 1, device=states.tokens.device)
    for start in range(0, n, row_block):
        rows = torch.arange(start, min(start + row_block, n), device=anchors.device)
        tokens = states.tokens[rows]
        for j, stream, at, valid in _chain(
            draft, states, rows, anchors.expand(len(rows), -1).contiguous(), depth
        ):
            best = torch.cat([draft.logits(part).argmax(-1) for part in stream.split(4096)])
            guess = draft.token_ids[best].view(valid.shape)
            text = tokens.gather(1, (at + 1).clamp(max=length - 1))
            hits[start : start + len(rows), 1:-1, j] = ((guess == text) & valid).cpu()
            counts[start : start + len(rows), 1:-1, j] = valid.cpu()
    return hits, counts


def _chain(
    draft: FeatureDraft, states: TargetStates, rows: torch.Tensor, anchors: torch.Tensor, depth: int
) -> Any:
    """Yields of each step: j, the output stream [B * n, H], the slots [B, n], and which of them count, bool [B, n]."""
    tokens, answers = states.tokens[rows], states.answers[rows]
    count_rows, length = tokens.shape
    n = anchors.shape[1]
    hidden = draft.fuse(states.streams[rows])
    slots = torch.arange(1, length, device=tokens.device)
    before = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    q, k, v = draft.project(tokens[:, 1:].reshape(-1), before, slots.repeat(count_rows))
    q, k, v = (x.view(count_rows, length - 1, *x.shape[1:]) for x in (q, k, v))
    b = torch.arange(count_rows, device=tokens.device)[:, None]
    k0, v0 = k.transpose(1, 2), v.transpose(1, 2)
    unseen = torch.zeros((count_rows, n, length - 1), dtype=k.dtype, device=k.device)
    unseen.masked_fill_(slots > anchors[:, :, None], -torch.inf)
    q = q[b, anchors - 1].flatten(0, 1)
    stream = hidden[b, anchors - 1].flatten(0, 1)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    valid = torch.ones_like(anchors, dtype=torch.bool)
    for j in range(depth):
        at = anchors + j
        valid = valid & (at + 1 < length)
        at = at.clamp(max=length - 1)
        valid = valid & answers.gather(1, (at + 1).clamp(max=length - 1))
        if j:
            q, k, v = draft.project(tokens.gather(1, at).flatten(), stream, at.flatten())
            keys.append(k.view(count_rows, n, *k.shape[1:]))
            values.append(v.view(count_rows, n, *v.shape[1:]))
        attended = _attend(q.view(count_rows, n, *q.shape[1:]), k0, v0, unseen, keys, values)
        stream = draft.finish(stream, attended)
        yield j, stream, at, valid


def _attend(
    q: torch.Tensor,
    k0: torch.Tensor,
    v0: torch.Tensor,
    unseen: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """Attention of each chain's newest slot over the text's slots up to its anchor and the chain's own.

    q [B, n, heads, d]; k0, v0 [B, kv_heads, slots, d]; unseen [B, n, slots], added to scores; keys, values: of the
    chain's later slots, each [B, n, kv_heads, d]. Returns [B * n, heads * d].
    """
    rows, n, heads, d = q.shape
    kv_heads = k0.shape[1]
    q = (q * d**-0.5).view(rows, n, kv_heads, -1, d).permute(0, 2, 3, 1, 4)  # [B, kv, group, n, d]
    group = q.shape[2]
    scores = (q.reshape(rows, kv_heads, group * n, d) @ k0.transpose(-1, -2)).view(
        rows, kv_heads, group, n, -1
    )
    parts = [scores + unseen[:, None, None]]
    if keys:
        parts.append(torch.einsum("bkgnd,bnjkd->bkgnj", q, torch.stack(keys, 2)))
    weights = torch.cat(parts, -1).softmax(-1)
    slots = k0.shape[2]
    out = (weights[..., :slots].reshape(rows, kv_heads, group * n, slots) @ v0).view(
        rows, kv_heads, group, n, d
    )
    if keys:
        out = out + torch.einsum("bkgnj,bnjkd->bkgnd", weights[..., slots:], torch.stack(values, 2))
    return out.permute(0, 3, 1, 2, 4).reshape(rows * n, heads * d)


class FeatureLearner:
    """A feature draft in training (`train.Learner`)."""

    def __init__(
        self,
        draft: FeatureDraft,
        target: Decoder,
        states: TargetStates,
        held_out: TargetStates,
        config: ChainConfig,
        report_depth: int = 7,
    ) -> None:
        self.draft, self.states, self.held_out, self.config = draft, states, held_out, config
        self.report_depth = report_depth
        self.token_ids = draft.token_ids
        self._target_head = Linear(head_rows(target, draft.token_ids))

    def holders(self) -> dict[str, Linear | RMSNorm]:
        return {**self.draft.linears(), **self.draft.norms()}

    def num_rows(self) -> int:
        return len(self.states)

    def rows_per_step(self) -> int:
        return self.config.rows

    def draw(self, rows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return rows, draw_anchors(self.states.answers[rows], self.config.anchors, generator)

    def loss(self, *drawn: torch.Tensor) -> torch.Tensor:
        rows, anchors = drawn
        return chain_loss(self.draft, self._target_head, self.states, rows, anchors, self.config)

    def figures(self) -> AcceptanceFigures:
        return acceptance(*chain_hits(self.draft, self.held_out, self.report_depth))
