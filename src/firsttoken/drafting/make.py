"""`firsttoken draft train`: from a model alone to a draft's folder. Every stage leaves its result on disk."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from firsttoken import __version__, models
from firsttoken.drafting.chat_format import ChatFormat
from firsttoken.drafting.corpus import GREEDY, Corpus, CorpusConfig, make_corpus
from firsttoken.drafting.export import save_shallow_draft
from firsttoken.drafting.feature import ChainConfig, FeatureLearner
from firsttoken.drafting.report import first_prompts, measured_speed, report_lines
from firsttoken.drafting.shallow import ShallowLearner
from firsttoken.drafting.states import target_states
from firsttoken.drafting.train import TrainConfig, Trainer, saved_steps, steps_in
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from firsttoken.speculate.draft_folder import save_feature_draft, write_json
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from firsttoken.speculate.shallow_draft import ShallowConfig, shallow_decoder

OnProgress = Callable[[str, int, int, str], None]
"""(stage, done, total, a word on how it goes)"""
HELD_OUT = "on held-out chats"
"""The stage under which held-out acceptance is told while training."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides a draft, beside the model."""

    kind: Literal["feature", "shallow"] = "feature"
    seed: int = 0
    rows: int = 32768
    length: int = 512
    shard_rows: int = 4096
    held_out_rows: int = 256
    minutes: float = 5.0
    """Of training; the number of steps follows from what one takes. Without meaning where `steps` is given."""
    steps: int | None = None
    batch_rows: int = 64
    anchors: int = 128
    depth: int = 5
    rate: float = 3e-3
    muon: bool = True
    hard_share: float = 0.25
    draft_vocab_size: int = 12288
    width: float = 2.0
    """feature: the MLP's width over the target's."""
    tuned_head: bool = False
    shared_layers: int = 2
    tuned_layers: int = 2


def make_draft(
    model_folder: Path,
    out: Path,
    recipe: Recipe,
    *,
    device: torch.device,
    work: Path,
    prompts: list[str] | None = None,
    command: str = "",
    on_progress: OnProgress = lambda stage, done, total, word: None,
) -> dict[str, Any]:
    """Corpus, states, training, figures, folder, speed. Interrupted, the same call goes on where it was; `work` holds
    the corpus and the training's last state. Returns what it wrote to recipe.json."""
    started = time.monotonic()
    seconds: dict[str, float] = {}
    state = work / f"{recipe.kind}-training.pt"
    described, starts = _trained(
        model_folder, out, recipe, device, work, state, prompts, command, seconds, on_progress
    )
    # The training's tensors are gone: the engine has the memory to itself.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with stage(seconds, "measuring"):
        described["speed"] = measured_speed(
            model_folder,
            out,
            starts,
            device.type,
            min(64, recipe.length // 4),
            lambda done, total, word: on_progress("measuring speed", done, total, word),
        )
    seconds["all"] = time.monotonic() - started
    described["seconds"] = {name: round(s, 1) for name, s in seconds.items()}
    write_json(out / "recipe.json", described)
    (out / "report.txt").write_text("\n".join(report_lines(described)) + "\n", encoding="utf-8")
    state.unlink(missing_ok=True)  # the same command would make a new draft now, not finish this one
    return described


def _trained(
    model_folder: Path,
    out: Path,
    recipe: Recipe,
    device: torch.device,
    work: Path,
    state: Path,
    prompts: list[str] | None,
    command: str,
    seconds: dict[str, float],
    on_progress: OnProgress,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Writes the draft's folder; returns its description, and prompts of held-out chats to measure speed with."""
    fingerprint = models.fingerprint(model_folder)
    target = load_model(model_folder, training_dtype(device), device, max_positions=recipe.length)
    with stage(seconds, "corpus"):
        corpus, held_out = _corpora(model_folder, target, recipe, work, fingerprint, prompts, on_progress)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with stage(seconds, "states"):
        learner, draft = _learner(target, recipe, corpus, held_out, on_progress)
    trainer = _trainer(learner, recipe, device, state, f"{fingerprint} {_digest(corpus)}")
    with stage(seconds, "training"):
        _train(trainer, state, on_progress)
    figures = learner.figures()
    described = {
        "made_by": f"firsttoken {__version__}",
        "command": command,
        "recipe": asdict(replace(recipe, steps=trainer.config.steps)),
        "target": fingerprint,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "seconds": {name: round(s, 1) for name, s in seconds.items()},
        "corpus_tokens": corpus.tokens.numel(),
        "held_out_tokens": figures.num_tokens,
        "head_coverage": round(_coverage(learner.token_ids, held_out), 4),
        "tokens_per_cycle": [round(x, 3) for x in figures.tokens_per_cycle],
        "acceptance_per_position": [round(x, 3) for x in figures.per_position],
    }
    if isinstance(draft, FeatureDraft):
        save_feature_draft(draft, target, model_folder, fingerprint, out, described)
    else:
        save_shallow_draft(
            draft,
            target,
            recipe.shared_layers,
            learner.token_ids,
            fingerprint,
            model_folder,
            out,
            described,
        )
    return described, first_prompts(held_out)


def _digest(corpus: Corpus) -> str:
    return hashlib.sha256(corpus.tokens.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def stage(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started


def training_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU. On a CPU float32, whose weights stay rows: packed ones have no gradients."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _corpora(
    model_folder: Path,
    target: Decoder,
    recipe: Recipe,
    work: Path,
    fingerprint: str,
    prompts: list[str] | None,
    on_progress: OnProgress,
) -> tuple[Corpus, Corpus]:
    chat = ChatFormat.from_folder(model_folder)
    config = CorpusConfig(
        rows=recipe.rows, length=recipe.length, shard_rows=recipe.shard_rows, seed=recipe.seed
    )
    held_config = CorpusConfig(
        rows=recipe.held_out_rows,
        length=min(384, recipe.length),
        shard_rows=recipe.held_out_rows,
        greedy_share=1.0,
        seed=recipe.seed + 1,
    )
    ids = _prompt_ids(model_folder, prompts) if prompts is not None else None
    kept = held = ids
    if ids is not None and len(ids) >= 20:  # the last tenth is for the figures alone
        kept, held = ids[: -len(ids) // 10], ids[-len(ids) // 10 :]
    total = config.rows * config.length
    done = 0

    def on_step(tokens: int) -> None:
        nonlocal done
        done += tokens
        on_progress("writing chats", min(done, total), total, "")

    corpus = make_corpus(
        target, chat, config, work / "corpus", target=fingerprint, prompts=kept, on_step=on_step
    )
    held_out = make_corpus(target, chat, held_config, work / "held-out", target=fingerprint, prompts=held)
    if not bool(corpus.answers.any()) or not bool(held_out.answers.any()):
        raise ConfigError(
            f"{model_folder}: in {corpus.tokens.shape[1]} tokens no conversation came to an answer; raise --length"
        )
    return corpus, first_answers(held_out)


def _prompt_ids(model_folder: Path, prompts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    return [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]


def first_answers(corpus: Corpus) -> Corpus:
    """The same conversations with only their first answers counted: what a chat's first request brings."""
    kinds = corpus.kinds.clone()
    for row in kinds:
        at = (row >= GREEDY).nonzero().flatten()
        gaps = (at[1:] - at[:-1] > 1).nonzero().flatten()
        if len(gaps):
            row[int(at[gaps[0]]) + 1 :] = 0
    return Corpus(corpus.tokens, kinds)


def _learner(
    target: Decoder, recipe: Recipe, corpus: Corpus, held_out: Corpus, on_progress: OnProgress
) -> tuple[Any, Any]:
    """The learner and its draft, with start values."""
    rows, done = len(corpus.tokens), 0

    def on_rows(count: int) -> None:
        nonlocal done
        done += count
        on_progress("reading states", done, rows, "")

    vocab = min(recipe.draft_vocab_size, target.config.vocab_size)
    token_ids = corpus.frequent_tokens(vocab, always=target.config.eos_token_ids).to(target.device)
    if recipe.kind == "shallow":
        shared = recipe.shared_layers
        if not 0 < shared + recipe.tuned_layers < target.config.num_layers:
            raise ConfigError(
                f"--layers {shared + recipe.tuned_layers}: the model has {target.config.num_layers}"
            )
        states = target_states(target, corpus, (shared,), on_rows=on_rows)
        shallow = shallow_decoder(
            target,
            ShallowConfig(shared_layers=shared, tuned_layers=recipe.tuned_layers, draft_vocab_size=vocab),
            token_ids,
        )
        return (
            ShallowLearner(
                shallow,
                shared,
                token_ids,
                states,
                target_states(target, held_out, (shared,)),
                rows=recipe.batch_rows,
                tokens_per_row=recipe.anchors,
                hard_share=recipe.hard_share,
            ),
            shallow,
        )
    config = FeatureConfig.for_target(
        target.config,
        draft_vocab_size=vocab,
        intermediate_size=round(target.config.intermediate_size * recipe.width),
        tuned_head=recipe.tuned_head,
    )
    states = target_states(target, corpus, config.capture, on_rows=on_rows)
    draft = FeatureDraft(config, target, token_ids)
    start_from_target(draft, target, recipe.seed)
    chain = ChainConfig(
        rows=recipe.batch_rows, anchors=recipe.anchors, depth=recipe.depth, hard_share=recipe.hard_share
    )
    held_states = target_states(target, held_out, config.capture)
    return FeatureLearner(draft, target, states, held_states, chain), draft


def _trainer(learner: Any, recipe: Recipe, device: torch.device, state: Path, data: str) -> Trainer:
    """With as many steps as asked for; given minutes, as many as an interrupted training had, else as fit.
    data: names target and corpus."""
    what = f"{data} {device.type} {replace(recipe, minutes=0.0, steps=None)}"

    def config(steps: int) -> TrainConfig:
        return TrainConfig(steps=steps, rate=recipe.rate, muon=recipe.muon, seed=recipe.seed, what=what)

    steps = recipe.steps or saved_steps(state, config(0))
    if steps is None:
        steps = steps_in(recipe.minutes, Trainer(learner, config(1), device).seconds_per_step())
    return Trainer(learner, config(steps), device)


def _train(trainer: Trainer, file: Path, on_progress: OnProgress) -> None:
    """To the end, from the last saved state if there is one; saved and held-out acceptance reported on the way."""
    total = trainer.config.steps
    if trainer.restore(file):
        on_progress("training", trainer.step, total, "going on")

    def on_step(step: int, loss: float) -> None:
        on_progress("training", step, total, f"loss {loss:.3f}")

    parts = 8
    for part in range(1, parts + 1):
        until = total * part // parts
        if until <= trainer.step:
            continue
        trainer.run(until, on_step=on_step, every=max(1, min(50, total // 20)))
        trainer.save(file)
        if part < parts:
            rates = trainer.learner.figures().tokens_per_cycle
            gamma = min(5, len(rates))
            on_progress(HELD_OUT, until, total, f"{rates[gamma - 1]:.2f} tokens per cycle at γ {gamma}")


def _coverage(token_ids: torch.Tensor, held_out: Corpus) -> float:
    """Share of held-out answer tokens that the head has."""
    answers = held_out.tokens[held_out.answers].long()
    return float(torch.isin(answers, token_ids.cpu()).float().mean()) if len(answers) else 0.0
