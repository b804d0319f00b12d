"""`firsttoken bench …`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from firsttoken.bench import goodput as bench_goodput
from firsttoken.bench import prompts, report, table
from firsttoken.bench.client import Client, run
from firsttoken.bench.machine import gpus
from firsttoken.bench.probe import base_url, connect
from firsttoken.bench.raw_draft import make_raw_draft
from firsttoken.bench.server_process import firsttoken_serve, serve
from firsttoken.bench.stages import Stage, TrialResult
from firsttoken.bench.stages_run import Journal, Plan, StagesReport, planned_stages, run_stages
from firsttoken.bench.stamped_http import Http
from firsttoken.config import duration
from firsttoken.engine.config import ConfigError
from firsttoken.models import home

T = TypeVar("T")

bench = typer.Typer(
    no_args_is_help=True, help="Measure: what each optimisation gives, as a table and a report."
)

Model = Annotated[
    str, typer.Argument(help="Model to serve and measure: a folder, a hub id, or a built-in name.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write everything, every request raw, to this file.")
]
Url = Annotated[
    str | None, typer.Option(help="Measure this server, started with --dev-mode, instead of starting one.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The key of the server at --url.")]
SERVE_FLAGS = {"allow_extra_args": True}
"""What stands after `--` goes to `firsttoken serve`."""


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.callback()
def _group() -> None:
    # `kill` and a closed terminal end a benchmark as Ctrl-C does: first the server that it started.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: signal.raise_signal(signal.SIGINT))


def _console() -> Console:
    """A log or a pipe has no width of its own: it gets one that holds the tables."""
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=120 if plain else None)


@bench.command(context_settings=SERVE_FLAGS)
def stages(
    ctx: typer.Context,
    model: Model,
    json_file: JsonFile = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write the report to this file.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Users at once, as 1,4. Default: 1,4; with a GPU 1,16,64.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Repeats of every trial.")] = 3,
    prompt_count: Annotated[
        int, typer.Option("--prompts", min=2, help="Requests per trial; at least two per user.")
    ] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 20,
    seed: Annotated[int, typer.Option(help="Orders trials and picks prompts.")] = 0,
    raw_draft: Annotated[
        Literal["off", "short", "full"],
        typer.Option(
            help="Row 3r, the model's untrained first 8 layers as a draft: none, one request, or all trials."
        ),
    ] = "short",
    url: Url = None,
    api_key: ApiKey = None,
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
        # A server at an address has files of its own: the draft is written for one that is started here.
        raw_draft="off" if url else raw_draft,
    )
    _check_writable(json_file, html_file)
    raw = None if plan.raw_draft == "off" else make_raw_draft(model)
    prompt_set = prompts.load()
    journal = Journal(home() / "bench" / f"stages-{plan.fingerprint(prompt_set)}.jsonl")
    console = _console()

    async def work(client: Client, progress: Progress) -> StagesReport:
        task = progress.add_task("", total=len(plan.order(planned_stages(1, raw, {}))))
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

        return await run_stages(client, plan, prompt_set, journal, raw_draft=raw, begins=begins, done=done)

    try:
        result = _against_server(model, url, api_key, ctx.args, console, work)
    except BaseException:
        if journal.read():
            print("the finished trials are kept; the same command goes on from there", file=sys.stderr)
        raise
    console.print(table.stages(result, console.width))
    _write(json_file, result.json, console)
    _write(html_file, lambda: report.html(result).encode(), console)
    journal.remove()
    if any(row.invalid for row in result.rows):
        raise typer.Exit(1)


@bench.command(context_settings=SERVE_FLAGS)
def goodput(
    ctx: typer.Context,
    model: Model,
    ttft_slo: Annotated[
        str | None,
        typer.Option(
            help="Limit for the first token, as 500ms. Default: twice what the longest prompts take on the"
            " idle server.",
            show_default=False,
        ),
    ] = None,
    overload: Annotated[float, typer.Option(min=0.1, help="Arrival rate, in multiples of capacity.")] = 1.3,
    requests: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Arrivals per trial. Default: so many that in order of arrival the last waits for three limits.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Repeats; each has arrivals of its own.")] = 3,
    seed: Annotated[int, typer.Option(help="Draws arrivals and prompts.")] = 0,
    json_file: JsonFile = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """How many first tokens come in time above capacity: deadlines against order of arrival.

    Measures capacity first, then sends the same Poisson arrivals of mixed prompt lengths under both orders of
    admission. Flags after -- go to `firsttoken serve`.
    """
    plan = bench_goodput.GoodputPlan(
        model=model,
        overload=overload,
        requests=requests,
        repeats=repeats,
        ttft_slo_ms=duration(ttft_slo, "ms", "--ttft-slo") if ttft_slo else None,
        seed=seed,
    )
    _check_writable(json_file)
    console = _console()

    async def work(client: Client, progress: Progress) -> bench_goodput.GoodputReport:
        task = progress.add_task("", total=bench_goodput.steps(plan), completed=-1)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return await bench_goodput.run_goodput(client, plan, prompts.load(), progress=step)

    result = _against_server(model, url, api_key, ctx.args, console, work)
    console.print(table.goodput(result))
    _write(json_file, result.json, console)


def _against_server(
    model: str,
    url: str | None,
    api_key: str | None,
    flags: list[str],
    console: Console,
    work: Callable[[Client, Progress], Awaitable[T]],
) -> T:
    """Runs `work` against the server at `url`, or against one that is started for it and ended after it."""
    if url and flags:
        raise ConfigError(
            "flags after -- are for the server that the benchmark starts; with --url there is none"
        )
    with ExitStack() as stack:
        server = None if url else stack.enter_context(serve(firsttoken_serve(model, flags)))
        progress = stack.enter_context(_progress(console))

        async def everything() -> T:
            if server:
                task = progress.add_task("starting the server", total=None)
                await server.ready(600)
                progress.remove_task(task)
            async with Http(server.url if server else base_url(url or "")) as http:
                return await work(await connect(http, api_key), progress)

        return run(everything())


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _check_writable(*files: Path | None) -> None:
    """Before minutes of work, not after them."""
    for file in filter(None, files):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            writable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
        except OSError:
            writable = False
        if not writable:
            raise ConfigError(f"cannot write {file}: give a file in a folder that you may write to")


def _write(file: Path | None, content: Callable[[], bytes], console: Console) -> None:
    if file:
        file.write_bytes(content())
        console.print(f"[dim]wrote {file}[/dim]")


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
