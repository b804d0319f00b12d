"""What a draft learns from: the target's residual streams and next-token logits at every position of a corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from firsttoken.drafting.corpus import Corpus
from firsttoken.engine.model.decoder import Decoder

_ROW_BLOCK = 64


class RowAttention:
    """Causal attention over rows of equal length that start at position 0; nothing is cached."""

    def __init__(self, rows: int, length: int, windows: tuple[int | None, ...]) -> None:
        self.shape = (rows, length)
        self.windows = windows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        window = self.windows[layer]
        mask = None
        if window is not None and window < self.shape[1]:
            ones = torch.ones(self.shape[1], self.shape[1], dtype=torch.bool, device=q.device)
            mask = ones.tril() & ones.triu(1 - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass
class TargetStates:
    """Of every position of a corpus, on the target's device. N rows of L tokens."""

    tokens: torch.Tensor
    """int64 [N, L]"""
    answers: torch.Tensor
    """bool [N, L]"""
    streams: torch.Tensor
    """[N, L, C * H]: the residual stream before each captured layer."""
    final: torch.Tensor
    """[N, L, H]: after the final norm, ready for the head."""
    log_total: torch.Tensor
    """float32 [N, L]: log-sum-exp of the logits over the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.tokens)


@torch.no_grad()
def target_states(
    model: Decoder,
    corpus: Corpus,
    capture: tuple[int, ...],
    *,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> TargetStates:
    """Runs the target over the corpus. Takes (C + 1) * H elements of memory a token."""
    rows, length = corpus.tokens.shape
    hidden = model.config.hidden_size
    streams = torch.empty((rows, length, len(capture) * hidden), dtype=model.dtype, device=model.device)
    final = torch.empty((rows, length, hidden), dtype=model.dtype, device=model.device)
    log_total = torch.empty((rows, length), dtype=torch.float32, device=model.device)
    tokens = corpus.tokens.to(model.device, torch.int64)
    positions = torch.arange(length, device=model.device)
    for start in range(0, rows, _ROW_BLOCK):
        block = tokens[start : start + _ROW_BLOCK]
        attend = RowAttention(len(block), length, model.config.layer_windows)
        out, captured = model.forward(block.flatten(), positions.repeat(len(block)), attend, capture=capture)
        streams[start : start + len(block)] = torch.cat(captured, -1).view(len(block), length, -1)
        final[start : start + len(block)] = out.view(len(block), length, -1)
        totals = [model.logits(part).float().logsumexp(-1) for part in out.split(4096)]
        log_total[start : start + len(block)] = torch.cat(totals).view(len(block), length)
        on_rows(len(block))
    return TargetStates(tokens, corpus.answers.to(model.device), streams, final, log_total)
