"""The corpus a draft is trained on: chats that the target writes itself, both sides of them.

Every row is one conversation. The model writes the user's text after its own chat header, then answers, then writes
the next user's text, until the row is full. All rows are at the same position in every step, so a step is one token
for each of thousands of rows, without padding. Half of the rows are answered greedily, half at temperature 0.8.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from firsttoken.drafting.chat_format import ChatFormat
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.decoder import Decoder

GIVEN, USER, GREEDY, SAMPLED = 0, 1, 2, 3
"""What a token is: of the template (or the padding of a prompt), of a user's text, of a greedy or sampled answer."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """What decides the tokens, up to the rounding of the device."""

    rows: int
    """Conversations."""
    length: int = 512
    """Tokens of each."""
    shard_rows: int = 4096
    """Rows generated at once: their KV cache is in memory together."""
    user_temperature: float = 1.0
    temperature: float = 0.8
    """Of the sampled answers."""
    max_user_tokens: int = 96
    max_answer_tokens: int = 256
    greedy_share: float = 0.5
    seed: int = 0


@dataclass
class Corpus:
    tokens: torch.Tensor
    """int32 [rows, length]"""
    kinds: torch.Tensor
    """uint8 [rows, length]: GIVEN, USER, GREEDY or SAMPLED."""

    @property
    def answers(self) -> torch.Tensor:
        """bool [rows, length]"""
        return self.kinds >= GREEDY

    def frequent_tokens(self, count: int, always: tuple[int, ...] = ()) -> torch.Tensor:
        """The `count` tokens most frequent in answers, ids ascending; `always` are among them. int64 [count]"""
        vocab = int(self.tokens.max()) + 1
        counts = torch.bincount(
            self.tokens[self.answers].long(), minlength=max(vocab, count, *[t + 1 for t in always], 1)
        )
        if always:
            counts[list(always)] = counts.max() + 1
        # Ties go to the smaller id, which a byte-level vocabulary gives to the more common token.
        return counts.argsort(descending=True, stable=True)[:count].sort().values


class _RowCache:
    """Contiguous KV for rows that are all at the same position: K and V [rows, kv_heads, length, head_dim] a layer."""

    def __init__(self, model: Decoder, rows: int, length: int) -> None:
        c = model.config
        shape = (c.num_layers, 2, rows, c.num_kv_heads, length, c.head_dim)
        self.layers = torch.empty(shape, dtype=model.dtype, device=model.device)
        self.windows = c.layer_windows
        self.position = 0

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.layers[layer]
        at, rows, kv_heads = self.position, len(q), k.shape[1]
        keys[:rows, :, at], values[:rows, :, at] = k, v
        window = self.windows[layer]
        first = max(0, at + 1 - window) if window else 0
        # Query heads that share a KV head become rows of one product: [rows, kv_heads, group, head_dim].
        # Not cuDNN: it plans anew for every length, 70 ms a token.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(
                q.reshape(rows, kv_heads, -1, q.shape[-1]),
                keys[:rows, :, first : at + 1],
                values[:rows, :, first : at + 1],
            )
        return out.reshape(rows, -1)


@torch.no_grad()
def write_chats(
    model: Decoder,
    chat: ChatFormat,
    config: CorpusConfig,
    rows: int,
    seed: int,
    *,
    prompts: list[list[int]] | None = None,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Corpus:
    """`rows` conversations. prompts: token ids of first user texts; row i starts with prompt i (modulo their number).

    on_step: called with the tokens written since the last call.
    """
    device, length = model.device, config.length
    cache = _RowCache(model, rows, length)
    generator = torch.Generator(device).manual_seed(seed)
    scripts, script = _scripts(chat, prompts, rows, length, device)
    to_answer, to_user = 0, 1
    cursor = torch.zeros(rows, dtype=torch.int64, device=device)
    answering = torch.full((rows,), prompts is not None, dtype=torch.bool, device=device)
    """Whose text follows the script."""
    written = torch.zeros(rows, dtype=torch.int64, device=device)
    greedy = torch.arange(rows, device=device) < round(rows * config.greedy_share)
    answer_temperature = torch.where(greedy, 0.0, config.temperature)
    answer_kind = torch.where(greedy, GREEDY, SAMPLED).to(torch.uint8)
    tokens = torch.empty((length, rows), dtype=torch.int64, device=device)
    kinds = torch.empty((length, rows), dtype=torch.uint8, device=device)
    sampled = torch.zeros(rows, dtype=torch.int64, device=device)
    eos = torch.tensor(model.config.eos_token_ids, device=device)
    for position in range(length):
        # What the script gives, else what was sampled.
        given = scripts[script, cursor]
        free = given < 0
        token = torch.where(free, sampled, given)
        tokens[position] = token
        kinds[position] = torch.where(free, torch.where(answering, answer_kind, USER), GIVEN)
        written = torch.where(free, written + 1, 0)
        cursor += ~free
        # A turn ends with its end mark, an end of text, or by being long enough; then the template goes on.
        mark = torch.where(answering, chat.to_user[0], chat.to_answer[0])
        limit = torch.where(answering, config.max_answer_tokens, config.max_user_tokens)
        marked = free & (token == mark)
        ended = marked | (free & (torch.isin(token, eos) | (written >= limit)))
        script = torch.where(ended, torch.where(answering, to_user, to_answer), script)
        cursor = torch.where(ended, marked.long(), cursor)  # the mark itself is already written
        answering = answering ^ ended
        if position + 1 == length:
            break
        cache.position = position
        positions = torch.full((rows,), position, dtype=torch.int64, device=device)
        logits = model.logits(model.forward(token, positions, cache))
        temperature = torch.where(answering, answer_temperature, config.user_temperature)
        sampled = _draw(logits, temperature, generator)
        on_step(rows)
    return Corpus(tokens.T.to("cpu", torch.int32).contiguous(), kinds.T.cpu().contiguous())


def _scripts(
    chat: ChatFormat, prompts: list[list[int]] | None, rows: int, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token scripts as rows of one table, each ended by -1, and the script that each row starts with: int64 [rows].

    Script 0 leads from a user's text to the answer, script 1 from an answer to the next user's text.
    """
    starts = (
        [list(chat.header)]
        if prompts is None
        else [[*chat.header, *prompt, *chat.to_answer][: length - 1] for prompt in prompts]
    )
    lists = [list(chat.to_answer), list(chat.to_user), *starts]
    table = torch.full((len(lists), max(map(len, lists)) + 1), -1, dtype=torch.int64)
    for i, ids in enumerate(lists):
        table[i, : len(ids)] = torch.tensor(ids)
    first = 2 + torch.arange(rows) % len(starts)
    return table.to(device), first.to(device)


def _draw(logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token of softmax(logits / T) for each row, the argmax where T is 0: argmax of logits + T · Gumbel noise.

    In blocks of rows: the noise of thousands of rows over a whole vocabulary is gigabytes.
    """
    picked = []
    for block, t in zip(logits.split(1024), temperature.split(1024), strict=True):
        noise = torch.empty(block.shape, dtype=torch.float32, device=block.device)
        noise.exponential_(generator=generator).log_()
        picked.append(torch.addcmul(block.float(), noise, t[:, None], value=-1).argmax(-1))
    return torch.cat(picked)


# -- on disk ------------------------------------------------------------------------------------------------


def corpus_shards(config: CorpusConfig) -> list[int]:
    """Rows of each shard."""
    whole, rest = divmod(config.rows, config.shard_rows)
    return [config.shard_rows] * whole + ([rest] if rest else [])


def make_corpus(
    model: Decoder,
    chat: ChatFormat,
    config: CorpusConfig,
    folder: Path,
    *,
    target: str,
    prompts: list[list[int]] | None = None,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Corpus:
    """The corpus in `folder`: shards that are there are read, the others written. `target`: the model's fingerprint.

    Raises ConfigError if the folder holds a corpus of other settings or of another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    of_prompts = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16] if prompts else None
    wanted: dict[str, Any] = {"target": target, **asdict(config), "prompts": of_prompts}
    described = folder / "corpus.json"
    if described.exists() and (found := json.loads(described.read_text())) != wanted:
        changed = ", ".join(sorted(k for k in wanted if found.get(k) != wanted[k]))
        raise ConfigError(
            f"{folder} holds a corpus with another {changed}: remove it or give another --work folder"
        )
    described.write_text(json.dumps(wanted, indent=1))
    shards = []
    for i, rows in enumerate(corpus_shards(config)):
        file = folder / f"shard-{i:03d}.safetensors"
        if file.exists():
            loaded = load_file(file)
            shards.append(Corpus(loaded["tokens"], loaded["kinds"]))
            on_step(rows * config.length)
            continue
        part = None
        if prompts is not None:
            first = i * config.shard_rows
            part = [prompts[(first + j) % len(prompts)] for j in range(min(rows, len(prompts)))]
        shard = write_chats(
            model, chat, config, rows, config.seed * 100_003 + i, prompts=part, on_step=on_step
        )
        partial = file.with_suffix(".partial")
        save_file({"tokens": shard.tokens, "kinds": shard.kinds}, partial)
        partial.replace(file)
        shards.append(shard)
    return Corpus(torch.cat([s.tokens for s in shards]), torch.cat([s.kinds for s in shards]))
