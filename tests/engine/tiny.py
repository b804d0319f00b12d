"""Tiny float64 models and the ways the engine's tests drive them."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firsttoken.engine import EngineConfig, Request, RequestOutput
from firsttoken.engine.attention.base import Batch, SeqSpan
from firsttoken.engine.engine import Engine
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.sequence import Sequence

VOCAB = 48
EOS = 1


@cache
def tiny_model(window: int | None = None) -> Decoder:
    """Two layers, grouped queries, float64: sums differ between batch shapes by 1e-16, never in a token."""
    raw: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
        "model_type": "mistral" if window else "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
    }
    if window:
        raw["sliding_window"] = window
    config = ModelConfig.from_dict(raw)
    return Decoder.random(config, torch.float64, torch.device("cpu"), seed=3)


def tiny_engine(
    *, speculator: Any = None, kv_tokens: int = 4096, window: int | None = None, **settings: Any
) -> Engine:
    """An engine on the tiny model with `kv_tokens` of cache. speculator: one, or a factory of one."""
    settings.setdefault("block_size", 4)
    settings.setdefault("max_model_len", min(128, kv_tokens))
    model = tiny_model(window)
    memory = model.config.kv_bytes_per_token(8) * kv_tokens
    config = EngineConfig(dtype="float64", device="cpu", kv_cache_memory=str(memory), **settings)
    make = speculator
    if speculator is not None and not callable(speculator):
        make = lambda *_: speculator  # noqa: E731
    return Engine(config, model=model, make_speculator=make)


def drain(engine: Engine, limit: int = 5000) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; outputs by request. Fails instead of hanging."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"requests still unfinished after {limit} steps")


def tokens_of(outputs: Seq[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def alone(request: Request, window: int | None = None) -> list[RequestOutput]:
    """The request by itself, with nothing that could change its text: no cache, no chunks, no drafts."""
    engine = tiny_engine(
        window=window,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        speculation="off",
        max_num_seqs=1,
    )
    engine.add_request(request)
    return drain(engine)[request.request_id]


class NoCache:
    """Textbook attention over the whole sequence: the reference for the paged cache."""

    def __init__(self, group: int, window: int | None = None) -> None:
        self.group, self.window = group, window

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(self.group, 1), v.repeat_interleave(self.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        n = len(q)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if self.window:
            seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - self.window)
        scores = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", scores, v).flatten(1)


@torch.inference_mode()
def full_logits(token_ids: list[int], window: int | None = None) -> torch.Tensor:
    """Logits [T, V] of every position, without any cache."""
    model = tiny_model(window)
    batch = Batch(torch.tensor(token_ids), torch.arange(len(token_ids)), [SeqSpan(0, len(token_ids), 0, [])])
    group = model.config.num_heads // model.config.num_kv_heads
    hidden = model.forward(batch.token_ids, batch.positions, NoCache(group, window))
    assert isinstance(hidden, torch.Tensor)
    return model.logits(hidden)


class ScriptedSpeculator:
    """Drafts from a function (sequence, count) -> tokens, `gamma` at a time."""

    capture = ()
    lookahead = 0

    def __init__(self, draft: Any, gamma: int) -> None:
        self.draft, self.gamma = draft, gamma
        self.offered = self.accepted = 0

    def propose(self, seqs: list[Sequence], budget: int) -> list[list[int]]:
        drafts = []
        for seq in seqs:
            room = seq.request.sampling.max_tokens - seq.num_output_tokens - 1
            tokens = self.draft(seq, min(self.gamma, room, budget)) if room > 0 and budget > 0 else []
            budget -= len(tokens)
            drafts.append(tokens)
        return drafts

    def observe(self, seq: Sequence, drafts: list[int], num_accepted: int) -> None:
        self.offered += len(drafts)
        self.accepted += num_accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        pass

    def computed(self, items: list[Any], *, prompts_wait: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"active": True, "gamma": self.gamma, "reason": "scripted"}


def run_workload(
    engine: Engine, work: list[tuple[int, Request, int | None]]
) -> dict[str, list[RequestOutput]]:
    """work: (step of arrival, request, step at which it is cancelled or None). Every request's outputs, when all have
    ended and step 40 is past; blocks are checked after each step."""
    got: dict[str, list[RequestOutput]] = {request.request_id: [] for _, request, _ in work}
    for step in range(600):
        for arrival, request, _ in work:
            if arrival == step:
                engine.add_request(request)
        for _, request, cancelled in work:
            if cancelled == step:
                engine.abort(request.request_id)
        for output in engine.step():
            got[output.request_id].append(output)
        engine.pool.check()
        if step > 40 and not engine.has_work():
            return got
    raise AssertionError("a request was never finished")


def write_checkpoint(folder: Path, raw: dict[str, Any], seed: int = 0) -> None:
    """A model's folder without a tokenizer: `raw` as its config.json, and random float32 weights."""
    (folder / "config.json").write_text(json.dumps(raw))
    decoder = Decoder.random(ModelConfig.from_dict(raw), torch.float32, torch.device("cpu"), seed)
    weights = {name: weight.contiguous() for name, weight in decoder.named_weights().items()}
    save_file(weights, folder / "model.safetensors")
