"""A draft's figures in words: the report that `draft train` ends with, and the tables of `draft measure`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from firsttoken.drafting.corpus import Corpus
from firsttoken.drafting.measure import AcceptanceRow, DraftMeter, SpeedRow, best_gamma, small_engine
from firsttoken.speculate.select import make_speculator

GAMMAS = (1, 2, 3, 5, 7)
BATCHES = (1, 4)
_PROMPTS = 8


def first_prompts(corpus: Corpus, count: int = _PROMPTS) -> list[list[int]]:
    """What stands before the first answer of each conversation: token ids, for the first `count` that have one."""
    found = []
    for tokens, answers in zip(corpus.tokens, corpus.answers, strict=True):
        if bool(answers.any()):
            found.append(tokens[: int(answers.int().argmax())].tolist())
    return found[:count]


def measured_speed(
    model: Path,
    draft: Path,
    prompts: list[list[int]],
    device: str,
    max_tokens: int = 64,
    on_progress: Callable[[int, int, str], None] = lambda done, total, word: None,
) -> dict[str, Any]:
    """For recipe.json: a row for each γ and batch size, and the γ to use at each batch size."""
    config = small_engine(model, batch=max(BATCHES), device="cuda" if device == "cuda" else "cpu")
    meter = DraftMeter(config, str(draft), make_speculator, max_tokens=max_tokens)
    rows = meter.speed({"held out": prompts}, gammas=GAMMAS, batches=BATCHES, on_progress=on_progress)
    return {
        "answers": f"{len(prompts)} first answers of held-out chats, greedy, at most {max_tokens} tokens each",
        "rows": [_rounded(row) for row in rows],
        "gamma_to_use": {str(batch): best_gamma(rows, batch) for batch in BATCHES},
    }


def _rounded(row: SpeedRow) -> dict[str, Any]:
    return {name: round(value, 3) for name, value in asdict(row).items()}


def report_lines(recipe: dict[str, Any]) -> list[str]:
    """The report of a draft's recipe.json, for a terminal and for the draft's folder."""
    rates, tokens = recipe["acceptance_per_position"], recipe["tokens_per_cycle"]
    lines = [
        f"{recipe['held_out_tokens']:,} held-out greedy tokens; the head covers {recipe['head_coverage']:.1%} of them:",
        _columns("γ", range(1, len(tokens) + 1)),
        _columns("tokens per cycle", (f"{t:.2f}" for t in tokens)),
        _columns("guess γ stands *", (f"{r:.0%}" for r in rates)),
        "* if those before it do",
    ]
    speed = recipe.get("speed")
    if not speed:
        return lines
    lines += ["", f"In the engine on this machine ({recipe['device']}): {speed['answers']}"]
    for batch, gamma in speed["gamma_to_use"].items():
        rows = [row for row in speed["rows"] if row["batch"] == int(batch)]
        at_a_time = "1 request at a time" if batch == "1" else f"{batch} requests at a time"
        use = f"use γ {gamma}" if gamma else "no γ pays: do not speculate"
        lines += [
            "",
            f"{at_a_time}: {use}",
            _columns("γ", (row["gamma"] for row in rows)),
            _columns("tokens per cycle", (f"{row['tokens_per_cycle']:.2f}" for row in rows)),
            _columns("speed-up, predicted", (f"{row['predicted']:.2f}x" for row in rows)),
            _columns("speed-up, measured", (f"{row['measured']:.2f}x" for row in rows)),
        ]
    return lines


def _columns(name: str, values: Any) -> str:
    return f"  {name:<20}" + "".join(f"{value!s:>7}" for value in values)


def acceptance_table(rows: list[AcceptanceRow], title: str) -> Table:
    table = Table(title=title)
    for column in (
        "text",
        "T",
        "guessed by",
        "accepted",
        "tokens per cycle",
        "guess 1, 2, … stands",
        "speed-up",
    ):
        table.add_column(column)
    names = {"noise": "the same noise", "argmax": "the likeliest"}
    for row in rows:
        table.add_row(
            row.category,
            f"{row.temperature:g}",
            names[row.draws] if row.temperature else "–",
            f"{row.acceptance_rate:.1%}",
            f"{row.tokens_per_cycle:.2f}",
            " ".join(f"{rate:.0%}" for rate in row.per_position),
            f"{row.speedup:.2f}x",
        )
    return table


def speed_table(rows: list[SpeedRow], title: str) -> Table:
    table = Table(title=title)
    for column in ("requests at a time", "γ", "tokens per cycle", "predicted", "measured", ""):
        table.add_column(column)
    best = {batch: best_gamma(rows, batch) for batch in {row.batch for row in rows}}
    for row in rows:
        table.add_row(
            str(row.batch),
            str(row.gamma),
            f"{row.tokens_per_cycle:.2f}",
            f"{row.predicted:.2f}x",
            f"{row.measured:.2f}x",
            "use this" if row.gamma == best[row.batch] else "",
        )
    for batch in sorted(b for b, gamma in best.items() if not gamma):
        table.add_row(str(batch), "0", "1.00", "", "1.00x", "use this: no γ pays")
    return table
