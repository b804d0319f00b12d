"""`firsttoken bench …`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from firsttoken.bench import prompts
from firsttoken.bench.client import run
from firsttoken.bench.machine import gpus
from firsttoken.bench.probe import base_url, connect
from firsttoken.bench.server_process import firsttoken_serve, serve
from firsttoken.bench.stages import Stage, TrialResult
from firsttoken.bench.stages_run import Journal, Plan, StagesReport, run_stages
from firsttoken.bench.stamped_http import Http
from firsttoken.bench.table import render
from firsttoken.engine.config import ConfigError
from firsttoken.models import home

bench = typer.Typer(
    no_args_is_help=True, help="Measure: what each optimisation gives, as a table and a report."
)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.callback()
def _group() -> None:
    # `kill` and a closed terminal end a benchmark as Ctrl-C does: first the server that it started.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: signal.raise_signal(signal.SIGINT))


@bench.command(context_settings={"allow_extra_args": True})
def stages(
    ctx: typer.Context,
    model: str = typer.Argument(help="Model to serve and measure: a folder, a hub id, or a built-in name."),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything, every trial raw, to this file.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report to this file.")] = None,
    concurrency: str | None = typer.Option(
        None, help="Users at once, as 1,4. Default: 1,4; with a GPU 1,16,64.", show_default=False
    ),
    repeats: int = typer.Option(3, min=3, help="Repeats of every trial."),
    prompt_count: int = typer.Option(
        6, "--prompts", min=2, help="Requests per trial; at least two per user."
    ),
    max_tokens: int = typer.Option(32, min=2, help="Tokens of every answer."),
    seed: int = typer.Option(0, help="Orders trials and picks prompts."),
    url: str | None = typer.Option(
        None, help="Measure this server, started with --dev-mode, instead of one's own."
    ),
    api_key: str | None = typer.Option(None, envvar="OPENAI_API_KEY", help="The key of the server at --url."),
) -> None:
    """What each optimisation does to the first token, stage by stage.

    Starts the server once on a free port and switches its settings between trials. Flags after -- go to
    `firsttoken serve`. The same command goes on where an interrupted run stopped.
    """
    plan = Plan(
        model=model,
        concurrency=_concurrency(concurrency),
        repeats=repeats,
        prompts=prompt_count,
        max_tokens=max_tokens,
        seed=seed,
        server=url or " ".join(ctx.args),
    )
    if url and ctx.args:
        raise ConfigError(
            "flags after -- are for the server that the benchmark starts; with --url there is none"
        )
    for file in (json_file, html_file):
        if file and not os.access(file.parent if file.parent.exists() else ".", os.W_OK):
            raise ConfigError(f"cannot write {file}: the folder is not writable")
    prompt_set = prompts.load()
    journal = Journal(home() / "bench" / f"stages-{plan.fingerprint(prompt_set)}.jsonl")
    console = Console(highlight=False)
    with ExitStack() as stack:
        server = None if url else stack.enter_context(serve(firsttoken_serve(model, ctx.args)))
        progress = stack.enter_context(_progress(console))

        async def work() -> StagesReport:
            if server:
                task = progress.add_task("starting the server", total=None)
                await server.ready(600)
                progress.remove_task(task)
            async with Http(server.url if server else base_url(url or "")) as http:
                client = await connect(http, api_key)
                return await _stages(client, plan, prompt_set, journal, progress)

        try:
            report = run(work())
        except BaseException:
            if journal.path.exists():
                progress.stop()
                print("the finished trials are kept; the same command goes on from there", file=sys.stderr)
            raise
    console.print(render(report))
    for file, data in ((json_file, report.json), (html_file, lambda: _html(report))):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data())
            console.print(f"[dim]wrote {file}[/dim]")
    journal.remove()
    if any(row.invalid for row in report.rows):
        raise typer.Exit(1)


async def _stages(client, plan, prompt_set, journal, progress) -> StagesReport:  # type: ignore[no-untyped-def]
    total = len(plan.order([""] * 5))
    task = progress.add_task("", total=total)
    resumed = len(journal.read())
    if resumed:
        progress.console.print(f"[dim]going on after {resumed} trials of an interrupted run[/dim]")

    def begins(stage: Stage, users: int, repeat: int) -> None:
        what = f"{stage.title}, {users} user{'s' * (users > 1)}, repeat {repeat + 1}"
        progress.update(task, description=what)

    def done(result: TrialResult) -> None:
        progress.advance(task)
        if result.invalid:
            progress.console.print(f"[red]stage {result.stage} INVALID:[/red] {result.invalid}")

    return await run_stages(client, plan, prompt_set, journal, begins=begins, done=done)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _html(report: StagesReport) -> bytes:
    from firsttoken.bench.report import html

    return html(report).encode()


def _concurrency(text: str | None) -> tuple[int, ...]:
    if text is None:
        return (1, 16, 64) if gpus() else (1, 4)
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--concurrency takes numbers with commas, as 1,4; not {text!r}") from None
    if values[0] < 1:
        raise ConfigError("--concurrency must be at least 1")
    return values
