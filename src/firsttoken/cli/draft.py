"""`firsttoken draft …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

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

    from firsttoken.drafting.make import Recipe, make_draft
    from firsttoken.models import resolve
    from firsttoken.speculate.find import draft_folder_of

    folder = resolve(model)
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
    print(f"draft in {made.folder}")
    print("on held-out greedy chats:")
    for i, (rate_, tokens) in enumerate(zip(made.per_position, made.tokens_per_cycle, strict=True), start=1):
        print(
            f"  γ {i}: {tokens:.2f} tokens per cycle; draft {i} stands {rate_:.1%} of the time if those before it do"
        )


def _lines(file: Path) -> list[str]:
    from firsttoken.engine.config import ConfigError

    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {file} can't be read: {error}") from None
    if not lines:
        raise ConfigError(f"--prompts {file} has no line with a prompt")
    return lines
