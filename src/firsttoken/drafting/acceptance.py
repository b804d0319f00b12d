"""From hits of chains to the figures that decide speed: acceptance per position, and tokens per cycle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class AcceptanceFigures:
    """Measured on texts of the target with a draft that was never trained on them."""

    per_position: list[float]
    """Chance that draft i stands if all before it did."""
    tokens_per_cycle: list[float]
    """For γ = 1, 2, …: tokens per verification, drafting as a server does: each cycle starts where the last ended."""
    num_tokens: int


def acceptance(hits: torch.Tensor, counts: torch.Tensor) -> AcceptanceFigures:
    """hits, counts: bool [N, L, depth] from `chain_hits`: per slot, whether draft j hits the text, and counts."""
    depth = hits.shape[-1]
    run = hits.cumprod(-1).bool()  # all drafts up to j hit
    reached = torch.cat((torch.ones_like(run[..., :1]), run[..., :-1]), -1) & counts
    tries = reached.flatten(0, 1).sum(0).double()
    stood = (run & counts).flatten(0, 1).sum(0).double()
    accepted = (run & counts).sum(-1).numpy()
    cycles = [0] * depth
    tokens = [0] * depth
    starts = counts[..., 0].numpy()
    for gamma in range(1, depth + 1):
        capped = np.minimum(accepted, gamma)
        for row in range(len(capped)):
            at, length = 0, capped.shape[1]
            stands, usable = capped[row].tolist(), starts[row].tolist()
            while at < length:
                if not usable[at]:
                    at += 1
                    continue
                behind = at + stands[at]
                cycles[gamma - 1] += 1
                tokens[gamma - 1] += (
                    stands[at] + usable[behind]
                )  # the token behind the drafts, if there is one
                at = behind + 1
    return AcceptanceFigures(
        per_position=(stood / tries.clamp(min=1)).tolist(),
        tokens_per_cycle=[t / max(c, 1) for t, c in zip(tokens, cycles, strict=True)],
        num_tokens=int(counts[..., 0].sum()),
    )
