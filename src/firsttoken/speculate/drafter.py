"""What a drafter is to the speculator, and the loop that all drafters with a model share."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from firsttoken.engine.noise import gumbel, row_key
from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed


class Judge(Protocol):
    """Says token by token how far the drafts of one cycle go. Sequences are numbered as they were handed over."""

    wants_probabilities: bool

    def keeps(self, index: int, probability: float) -> bool:
        """Whether the next token of a sequence's draft is kept; no further one is asked about after a no.
        probability: the drafter's own, of that token."""

    def took(self, steps: int, seconds: float) -> None:
        """The cycle's drafting steps and their time."""


class Drafter(Protocol):
    """Makes drafts when told to; knows nothing of whether they pay (`speculator.Speculator` does)."""

    name: str
    capture: tuple[int, ...]
    """See `engine.speculation.Speculator`."""
    lookahead: int
    """1 if drafting writes into the sequences' own blocks, at the positions of its input tokens; else 0."""
    step_share: float
    """What a drafting step takes of a step of the model, until it has been measured; 0: it costs nothing."""

    def offers(self, seqs: list[Sequence], rooms: list[int]) -> list[int]:
        """The most tokens that can be drafted for each sequence now, at most rooms[i]. Does no forward pass."""

    def catch_up(self, seqs: list[Sequence]) -> None:
        """Brings sequences that will be drafted for up to a few tokens behind their computed ones."""

    def draft(self, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
        """Drafts of at most counts[i] >= 1 tokens, within what `offers` said, each as long as the judge keeps it."""

    def computed(self, items: list[Computed], *, work: bool) -> None:
        """As `engine.speculation.Speculator.computed`. work: whether a drafter that lags may catch up now."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended. Its last step's `computed` is still to come, unless it was aborted."""


class Chain(Protocol):
    """One cycle's drafting by a model, for S sequences in step."""

    token_ids: torch.Tensor
    """int64 [D]: the target's id of each row of the draft's head."""

    def first(self) -> torch.Tensor:
        """Logits [S, D] of the first drafted tokens."""

    def then(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens int64 [S] picked from the last logits → logits [S, D] of the next ones."""


def run_chain(chain: Chain, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
    """Drafts until every sequence has its count or is told to stop by the judge."""
    started = time.perf_counter()
    steps = max(counts)
    drafts: list[list[int]] = [[] for _ in seqs]
    logits = chain.first()
    for j in range(steps):
        rows, likely = _pick(logits, chain.token_ids, seqs, j, judge.wants_probabilities)
        picked = chain.token_ids[rows]
        for i, (token, probability) in enumerate(zip(picked.tolist(), likely, strict=True)):
            if len(drafts[i]) == j < counts[i] and judge.keeps(i, probability):
                drafts[i].append(token)
        if j + 1 == steps or not any(len(d) == j + 1 < n for d, n in zip(drafts, counts, strict=True)):
            break
        logits = chain.then(picked)
    judge.took(j + 1, time.perf_counter() - started)
    return drafts


def _pick(
    logits: torch.Tensor, token_ids: torch.Tensor, seqs: list[Sequence], step: int, with_probabilities: bool
) -> tuple[torch.Tensor, list[float]]:
    """Row of the head for each sequence, with the noise and temperature by which the target will sample there,
    and the likeliest token's probability by the draft (1 without `with_probabilities`)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    temperatures = [s.request.sampling.temperature for s in seqs]
    scores = wide
    if any(temperatures):
        t = torch.tensor(temperatures, dtype=wide.dtype, device=wide.device)[:, None]
        keys = torch.tensor(
            [row_key(s.noise_seed, s.request.choice_index, len(s.token_ids) + step) for s in seqs],
            device=wide.device,
        )
        scores = torch.addcmul(wide, gumbel(keys, token_ids, wide.dtype), t)
    rows = scores.argmax(-1)
    if not with_probabilities:
        return rows, [1.0] * len(seqs)
    return rows, (wide.amax(-1) - wide.logsumexp(-1)).exp().tolist()
