"""Exported drafts in vLLM: do they load, and are they accepted as often as in firsttoken?

    PEERS=DIR python benchmarks/drafts_in_vllm.py [--shallow FOLDER] [--feature FOLDER] [--offsets] [--json FILE]

Both engines answer the same prompts (token ids, greedy, float32, the same γ), one engine at a time. float32, so that
both write the same texts: what is compared is then the drafts alone. PEERS holds vllm-cpu/setup.sh, serve.sh and
stop.sh; vLLM is installed by its setup.sh on first use (3.4 GB).

    --shallow    a shallow draft of `firsttoken draft train --kind shallow`: vLLM's draft_model
    --feature    a feature draft, exported as EAGLE-3: vLLM's eagle3. Default: the draft that ships with the model
    --raw N      the model's first N layers as they are: vLLM's draft_model
    --offsets    eagle3 also with its layer ids moved by one, down and up: the right ids must be the best

About 3 minutes a draft on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpu_vs_vllm import NAME, Trouble, vllm
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoTokenizer

from firsttoken.bench import machine, prompts
from firsttoken.drafting.export import export_eagle3, export_layers
from firsttoken.drafting.measure import DraftMeter, small_engine
from firsttoken.models import resolve
from firsttoken.speculate.find import own_draft
from firsttoken.speculate.select import make_speculator

MOST = 0.03
"""Acceptances of the two engines are the same if they differ by no more."""


@dataclass(frozen=True)
class Case:
    """One draft: how firsttoken takes it, and how vLLM does."""

    name: str
    ours: Path | None
    """None: not measured here (ids moved on purpose)."""
    method: str
    exported: Path


@dataclass(frozen=True)
class Result:
    name: str
    method: str
    ours: float | None
    """Accepted over drafted tokens."""
    ours_per_position: list[float]
    theirs: float | None
    theirs_per_position: list[float]
    same_texts: str
    error: str = ""


def main() -> int:
    args = arguments()
    peers = Path(os.environ.get("PEERS") or ".") / "vllm-cpu"
    if not (peers / "serve.sh").exists():
        print("error: set PEERS to the folder that holds vllm-cpu/serve.sh", file=sys.stderr)
        return 2
    model = resolve(args.model)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    turns = [p.turn for p in prompts.load().measured if p.category in args.categories][: args.prompts]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
        )
        for turn in turns
    ]
    columns = (TextColumn("{task.description:44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as temporary, Progress(*columns, transient=True) as progress:
        cases = list(made(args, model, Path(temporary)))
        task = progress.add_task("", total=2 * len(cases))
        results = []
        for case in cases:
            progress.update(task, description=f"{case.name}: firsttoken")
            texts: list[list[int]] = []
            ours, ours_per_position = None, []
            if case.ours is not None:
                ours, ours_per_position, texts = in_firsttoken(args, model, case.ours, chats)
            progress.update(task, description=f"{case.name}: vLLM", advance=1)
            theirs, theirs_per_position, error, same = None, [], "", ""
            try:
                theirs, theirs_per_position, their_texts = in_vllm(args, peers, model, case, chats)
                if texts:
                    equal = sum(a == b for a, b in zip(texts, their_texts, strict=True))
                    same = f"{equal} of {len(texts)}"
            except Trouble as trouble:
                error = str(trouble)
            progress.advance(task)
            results.append(
                Result(
                    case.name, case.method, ours, ours_per_position, theirs, theirs_per_position, same, error
                )
            )
    show(args, results)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine.describe(), "date": machine.now(), "command": machine.command()}
        args.json.write_text(json.dumps({**report, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    far = [r for r in results if r.ours is not None and (r.theirs is None or abs(r.ours - r.theirs) > MOST)]
    return 1 if far else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shallow", type=Path)
    parser.add_argument("--feature", type=Path)
    parser.add_argument("--no-feature", action="store_true")
    parser.add_argument("--raw", type=int, metavar="N")
    parser.add_argument("--offsets", action="store_true")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--categories", nargs="+", default=["chat"])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def made(args: argparse.Namespace, model: Path, folder: Path) -> Iterator[Case]:
    """Writes the exports into `folder`."""
    if args.raw:
        export_layers(model, args.raw, folder / "raw")
        yield Case(f"first {args.raw} layers", folder / "raw", "draft_model", folder / "raw")
    if args.shallow:
        yield Case("shallow", args.shallow, "draft_model", args.shallow)
    if args.no_feature:
        return
    feature = args.feature or own_draft(model)
    if feature is None:
        raise SystemExit(f"error: {args.model} has no feature draft: name one with --feature")
    export_eagle3(model, feature, folder / "eagle3")
    yield Case("feature", feature, "eagle3", folder / "eagle3")
    for by in (-1, 1) if args.offsets else ():
        moved = folder / f"eagle3{by:+}"
        export_eagle3(model, feature, moved)
        config = json.loads((moved / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = [
            i + by for i in config["eagle_aux_hidden_state_layer_ids"]
        ]
        (moved / "config.json").write_text(json.dumps(config))
        yield Case(f"feature, layer ids {by:+}", None, "eagle3", moved)


def in_firsttoken(
    args: argparse.Namespace, model: Path, draft: Path, chats: list[list[int]]
) -> tuple[float, list[float], list[list[int]]]:
    config = small_engine(model, batch=1, dtype="float32")
    meter = DraftMeter(config, str(draft), make_speculator, max_tokens=args.max_tokens)
    run = meter.run(chats, args.gamma)
    return run.acceptance_rate, run.per_position, run.texts


def in_vllm(
    args: argparse.Namespace, peers: Path, model: Path, case: Case, chats: list[list[int]]
) -> tuple[float, list[float], list[list[int]]]:
    """Raises Trouble with the end of vLLM's log if it does not start."""
    speculative = {
        "method": case.method,
        "model": str(case.exported),
        "num_speculative_tokens": args.gamma,
    }
    # Eager: acceptance is asked for, not speed, and compiling takes a minute.
    flags = ["--enforce-eager", "--speculative-config", json.dumps(speculative)]
    os.environ["DTYPE"] = "float32"
    with vllm(model, peers, prefix_cache=True, flags=flags) as server:
        texts = [complete(server.url, ids, args.max_tokens) for ids in chats]
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
            page = response.read().decode()
    drafts, drafted, accepted = (
        total(page, f"vllm:spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    stood = [total(page, name, f'position="{i}"') for i in range(args.gamma)]
    reached = [drafts, *stood]
    return accepted / drafted, [s / r if r else 0.0 for s, r in zip(stood, reached, strict=False)], texts


def complete(url: str, ids: list[int], max_tokens: int) -> list[int]:
    body: dict[str, Any] = {
        "model": NAME,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return list(json.load(response)["choices"][0]["token_ids"])


def total(page: str, name: str, label: str = "") -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith(name + "{") and label in line
    )


def show(args: argparse.Namespace, results: list[Result]) -> None:
    table = Table(title=f"γ {args.gamma}, greedy, float32, {args.prompts} prompts")
    for column in (
        "draft",
        "vLLM's method",
        "firsttoken accepts",
        "vLLM accepts",
        "points apart",
        "same texts",
    ):
        table.add_column(column)
    for r in results:
        ours = "–" if r.ours is None else f"{r.ours:.1%}"
        theirs = "does not start" if r.theirs is None else f"{r.theirs:.1%}"
        apart = "–" if r.ours is None or r.theirs is None else f"{100 * abs(r.ours - r.theirs):.1f}"
        table.add_row(r.name, r.method, ours, theirs, apart, r.same_texts)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for r in results:
        for who, rates in (("firsttoken", r.ours_per_position), ("vLLM", r.theirs_per_position)):
            if rates:
                console.print(f"{r.name}, {who}, by position: " + " ".join(f"{rate:.0%}" for rate in rates))
        if r.error:
            console.print(f"{r.name}: {r.error}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
