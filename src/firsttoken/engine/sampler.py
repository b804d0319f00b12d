"""Logits to tokens, and which drafted tokens stand.

Two paths. Rows that only want the argmax of the raw logits take it. All others take the full path, in the order
logit bias, penalties, min_tokens mask, temperature, top-k, top-p, min-p, noise. Every operation works on a row
by itself, so a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from firsttoken.engine.noise import gumbel, row_key
from firsttoken.engine.request import SamplingParams, TokenLogprobs
from firsttoken.engine.sequence import Sequence

_TOP_P_PREFIX = 1024
"""top-p first looks among this many likeliest tokens; only a row whose nucleus is larger is sorted whole."""


@dataclass(slots=True)
class SampleRow:
    """One row of logits: the sequence's next token, if its known tokens were followed by `drafts`."""

    seq: Sequence
    drafts: list[int]

    @property
    def position(self) -> int:
        """Absolute position of the token to be sampled."""
        return len(self.seq.token_ids) + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return self.seq.num_output_tokens + len(self.drafts)


def is_plain_greedy(s: SamplingParams) -> bool:
    """True if the token is the argmax of the raw logits whatever came before."""
    return s.temperature == 0 and not s.min_tokens and not s.logit_bias and not has_penalties(s)


def has_penalties(s: SamplingParams) -> bool:
    return s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1


class Sampler:
    """Samples rows of logits [R, V]. `eos_token_ids` are masked while a request is below its min_tokens."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.device = device
        self._token_ids = torch.arange(vocab_size, device=device)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
        """Token ids, one a row. `logits` is left as it is."""
        full = [i for i, row in enumerate(rows) if not is_plain_greedy(row.seq.request.sampling)]
        if not full:
            return logits.argmax(dim=-1).tolist()
        if len(full) == len(rows):
            return self._sample_full(logits, rows)
        tokens = logits.argmax(dim=-1).tolist()
        index = torch.tensor(full, device=self.device)
        for i, token in zip(full, self._sample_full(logits[index], [rows[i] for i in full]), strict=True):
            tokens[i] = token
        return tokens

    def scores(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        """What `sample` takes the argmax of, [R, V]: processed logits plus noise, -inf where excluded."""
        return self._process(logits, rows)

    def _sample_full(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
        return self._process(logits, rows).argmax(dim=-1).tolist()

    def _process(self, logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
        x = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        params = [row.seq.request.sampling for row in rows]
        for i, (row, s) in enumerate(zip(rows, params, strict=True)):
            if s.logit_bias:
                ids = torch.tensor(list(s.logit_bias), device=x.device)
                x[i, ids] += torch.tensor(list(s.logit_bias.values()), dtype=x.dtype, device=x.device)
            if has_penalties(s):
                self._penalise(x[i], row, s)
            if row.num_output_tokens < s.min_tokens:
                x[i, list({*self.eos_token_ids, *s.stop_token_ids})] = -torch.inf
        noisy = [i for i, s in enumerate(params) if s.temperature > 0]
        if not noisy:
            return x
        if len(noisy) == len(rows):
            return self._add_noise(x, rows, params)
        index = torch.tensor(noisy, device=x.device)
        x[index] = self._add_noise(x[index], [rows[i] for i in noisy], [params[i] for i in noisy])
        return x

    def _penalise(self, x: torch.Tensor, row: SampleRow, s: SamplingParams) -> None:
        """Repetition penalty over prompt and output (Keskar et al., 2019), then OpenAI's frequency and presence
        penalties over the output. x [V], in place. Drafts before this row count as output."""
        if s.repetition_penalty != 1:
            ids = torch.tensor(list({*row.seq.token_ids, *row.drafts}), device=x.device)
            seen = x[ids]
            x[ids] = torch.where(seen > 0, seen / s.repetition_penalty, seen * s.repetition_penalty)
        if s.presence_penalty or s.frequency_penalty:
            counts = dict(row.seq.output_counts)
            for token in row.drafts:
                counts[token] = counts.get(token, 0) + 1
            if counts:
                ids = torch.tensor(list(counts), device=x.device)
                times = torch.tensor(list(counts.values()), dtype=x.dtype, device=x.device)
                x[ids] -= s.presence_penalty + s.frequency_penalty * times

    def _add_noise(
        self, x: torch.Tensor, rows: list[SampleRow], params: list[SamplingParams]
    ) -> torch.Tensor:
        """Temperature, filters and Gumbel noise for rows with T > 0. x [R, V] is overwritten and returned."""
        x /= torch.tensor([[s.temperature] for s in params], dtype=x.dtype, device=x.device)
        for i, s in enumerate(params):
            if 0 < s.top_k < self.vocab_size or s.top_p < 1 or s.min_p > 0:
                keep_likely(x[i], s.top_k, s.top_p, s.min_p)
        keys = torch.tensor(
            [row_key(r.seq.noise_seed, r.seq.request.choice_index, r.position) for r in rows], device=x.device
        )
        x += gumbel(keys, self._token_ids, x.dtype)
        return x


def keep_likely(x: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Sets to -inf, in place, what top-k, then top-p (nucleus), then min-p leave out. x [V]: logits / T.

    top-p keeps the smallest set of likeliest tokens whose probability, renormalised after top-k, reaches top_p;
    min-p keeps tokens of at least min_p times the likeliest one's probability. Tokens that tie with the last
    one kept are kept.
    """
    floor = x.new_tensor(-torch.inf)
    vocab = x.shape[0]
    log_total = None
    if 0 < top_k < vocab:
        likely = x.topk(top_k).values
        floor = likely[-1]
        log_total = likely.logsumexp(0)
    if top_p < 1:
        if log_total is None:
            log_total = x.logsumexp(0)
        width = min(_TOP_P_PREFIX, vocab) if not 0 < top_k < vocab else top_k
        while True:
            likely = x.topk(width).values
            reached = (likely - log_total).exp().cumsum(0)
            inside = int((reached < top_p).sum())
            if inside < width or width == vocab or 0 < top_k <= width:
                break
            width = vocab
        floor = torch.maximum(floor, likely[min(inside, width - 1)])
    if min_p > 0:
        floor = torch.maximum(floor, x.max() + torch.tensor(min_p, dtype=x.dtype).log())
    x.masked_fill_(x < floor, -torch.inf)


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """The tokens that stand: sampled[i] was drawn as if drafts[:i] were right, so it counts while they are.

    `sampled` has one more entry than `drafts`. The result is lossless for any sampling setting: it is what
    sampling one token at a time would have given.
    """
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return sampled[: count + 1]


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Logprobs of given tokens and of the likeliest ones, from raw logits [R, V].

    num_top: how many likeliest tokens to report for each row.
    """
    if not token_ids:
        return []
    logprobs = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1).add(1).tolist()
    most = max(num_top)
    top_values, top_ids = logprobs.topk(most) if most else (logprobs[:, :0], logprobs[:, :0])
    values, ids = top_values.tolist(), top_ids.tolist()
    return [
        TokenLogprobs(token_id=t, logprob=p, rank=r, top=list(zip(i[:n], v[:n], strict=True)))
        for t, p, r, i, v, n in zip(
            token_ids, chosen[:, 0].tolist(), ranks, ids, values, num_top, strict=True
        )
    ]
