"""`firsttoken draft …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

group = typer.Typer(no_args_is_help=True, help="Make, check and measure drafts for speculation.")

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a hub id (org/name) or a built-in name (smollm2-135m)."),
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="draft")


@group.command()
def train(
    model: ModelArgument,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: where serve looks for the model's draft.")
    ] = None,
    kind: Annotated[
        Literal["feature", "shallow"],
        typer.Option(
            help="feature: a layer over the target's hidden states; shallow: its first layers, tuned."
        ),
    ] = "feature",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File with a user's prompt a line. Default: the model writes the user's texts itself."
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Minutes of training; corpus and states come before.")
    ] = 5.0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps instead of --minutes: the same seed gives the same draft."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Conversations to learn from. Default: 32768 on a GPU, 512 on a CPU."),
    ] = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens of each conversation.")] = 512,
    layers: Annotated[
        int, typer.Option(min=2, help="shallow: depth of the draft; half of its layers are tuned.")
    ] = 4,
    vocab: Annotated[int, typer.Option(min=1, help="Tokens that the draft's head covers.")] = 12288,
    width: Annotated[float, typer.Option(min=0.1, help="feature: width of the MLP over the target's.")] = 2.0,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Seed of corpus, start values and order.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is a GPU.")
    ] = "auto",
    work: Annotated[
        Path | None, typer.Option(help="Folder for corpus and training state. Default: beside --out.")
    ] = None,
) -> None:
    """Make a draft from the model alone, in minutes. Interrupted, the same command goes on."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from firsttoken.drafting.make import HELD_OUT, Recipe, make_draft
    from firsttoken.drafting.report import report_lines
    from firsttoken.engine.config import ConfigError
    from firsttoken.models import resolve
    from firsttoken.speculate.find import draft_folder_of

    folder = resolve(model)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; give --device cpu, or auto")
    chosen = torch.device(device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = chosen.type == "cuda"
    recipe = Recipe(
        kind=kind,
        seed=seed,
        rows=rows or (32768 if on_gpu else 512),
        length=length,
        shard_rows=4096 if on_gpu else 64,
        held_out_rows=256 if on_gpu else 16,
        minutes=minutes,
        steps=steps,
        batch_rows=64 if on_gpu else 4,
        anchors=128 if on_gpu else 32,
        rate=rate,
        draft_vocab_size=vocab,
        width=width,
        shared_layers=layers - layers // 2,
        tuned_layers=layers // 2,
    )
    target = out or draft_folder_of(folder)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[word]}"),
    )
    with Progress(*columns) as bar:
        tasks: dict[str, Any] = {}

        def on_progress(stage: str, done: int, total: int, word: str) -> None:
            if stage == HELD_OUT:
                bar.console.print(f"step {done:,} of {total:,}: {word} {stage}", highlight=False)
                return
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, word="")
            bar.update(tasks[stage], completed=done, word=word)

        made = make_draft(
            folder,
            target,
            recipe,
            device=chosen,
            work=work or target.with_name(target.name + "-work"),
            prompts=_lines(prompts) if prompts else None,
            command="firsttoken " + " ".join(sys.argv[1:]),
            on_progress=on_progress,
        )
    print(f"draft in {target}")
    print("\n".join(report_lines(made)))


@group.command()
def export(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="The model's first N layers, as they are (mostly rejected: see docs)."),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(help="A feature draft to write as an EAGLE-3 checkpoint. Default: the model's own."),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="An EAGLE-3 checkpoint with start values, to try a server with."),
    ] = False,
) -> None:
    """Write a draft as a plain checkpoint, for vLLM's draft_model or eagle3."""
    from firsttoken.drafting.export import export_eagle3, export_layers
    from firsttoken.engine.config import ConfigError
    from firsttoken.models import resolve
    from firsttoken.speculate.find import own_draft

    folder = resolve(model)
    if layers is not None:
        if draft or untrained:
            raise ConfigError(
                "--layers goes with neither --draft nor --untrained: they write different things"
            )
        export_layers(folder, layers, out)
        method = "draft_model"
    else:
        source = None if untrained else draft or own_draft(folder)
        if source is None and not untrained:
            raise ConfigError(
                f"{model} has no draft yet: make one with `firsttoken draft train {model}`, name one with --draft, or"
                " give --layers"
            )
        export_eagle3(folder, source, out)
        method = "eagle3"
    config = {"method": method, "model": str(out), "num_speculative_tokens": 5}
    print(f"{out}\nvllm serve … --speculative-config '{json.dumps(config)}'")


@group.command()
def check(
    model: ModelArgument,
    draft: Annotated[Path, typer.Argument(metavar="DRAFT", help="The draft's folder.")],
) -> None:
    """Say whether a draft fits a model, a line a subject. Exit code 1 if it cannot work."""
    from firsttoken.drafting.check import check_draft
    from firsttoken.models import resolve

    findings = check_draft(resolve(model), draft)
    for finding in findings:
        print(f"{finding.severity:8} {finding.text}")
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@group.command()
def measure(
    model: ModelArgument,
    draft: Annotated[
        str | None,
        typer.Argument(metavar="DRAFT", help="The draft's folder, or ngram. Default: the model's own."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File with a user's prompt a line. Default: chat, code and creative writing."),
    ] = None,
    gamma: Annotated[int, typer.Option(min=1, max=32, help="Tokens drafted per step, for acceptance.")] = 5,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="May be given several times. Default: 0, 0.7 and 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 64,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests at a time, for speed; several times. Default: 1 and 4."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure a draft here: acceptance by kind of text, position and temperature; speed-up by γ."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import AutoTokenizer

    from firsttoken.drafting.measure import DraftMeter, small_engine
    from firsttoken.drafting.report import GAMMAS, acceptance_table, speed_table
    from firsttoken.engine.config import ConfigError
    from firsttoken.models import resolve
    from firsttoken.speculate.find import own_draft
    from firsttoken.speculate.select import make_speculator

    folder = resolve(model)
    source = draft or own_draft(folder)
    if source is None:
        raise ConfigError(
            f"{model} has no draft yet: make one with `firsttoken draft train {model}`, or name one"
        )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = {
        category: [
            cast(
                list[int],
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
                ),
            )
            for turn in turns
        ]
        for category, turns in _turns(prompts, count).items()
    }
    batches = tuple(concurrency or (1, 4))
    config = small_engine(folder, batch=max(batches))
    meter = DraftMeter(config, str(source), make_speculator, max_tokens=max_tokens)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("")

        def on_progress(done: int, total: int, word: str) -> None:
            bar.update(task, completed=done, total=total, description=word)

        accepted = meter.acceptance(
            ids, gamma=gamma, temperatures=tuple(temperature or (0.0, 0.7, 1.0)), on_progress=on_progress
        )
        speeds = meter.speed(
            ids, gammas=tuple(sorted({*GAMMAS, gamma})), batches=batches, on_progress=on_progress
        )
    if as_json:
        print(json.dumps({"acceptance": [asdict(r) for r in accepted], "speed": [asdict(r) for r in speeds]}))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    name = Path(source).name
    console.print(acceptance_table(accepted, f"{name}: acceptance at γ {gamma}, one request at a time"))
    console.print(speed_table(speeds, f"{name}: speed-up, greedy, all of these prompts"))


def _turns(file: Path | None, count: int) -> dict[str, list[str]]:
    """A user's texts by category: the file's, or the first `count` of the benchmark's, without its system prompt."""
    if file is not None:
        return {"given": _lines(file)}
    from firsttoken.bench.prompts import load

    turns: dict[str, list[str]] = {}
    for prompt in load().measured:
        if prompt.category in ("chat", "code", "creative"):
            turns.setdefault(prompt.category, []).append(prompt.turn)
    return {category: some[:count] for category, some in turns.items()}


def _lines(file: Path) -> list[str]:
    from firsttoken.engine.config import ConfigError

    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} can't be read: {error}") from None
    if not lines:
        raise ConfigError(f"--prompts {file} has no line with a prompt")
    return lines
