"""`firsttoken probe URL`."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from firsttoken.bench import metrics
from firsttoken.bench.client import run
from firsttoken.bench.probe import PARTS, PROMPT, Probe, summary
from firsttoken.bench.probe import probe as send_probe


def register(app: typer.Typer) -> None:
    app.command("probe")(probe)


def probe(
    url: str = typer.Argument(help="Address of an OpenAI-compatible server, as http://127.0.0.1:8000."),
    model: str | None = typer.Option(None, help="Model to ask. Default: the first that the server lists."),
    api_key: str | None = typer.Option(
        None, envvar="OPENAI_API_KEY", show_envvar=True, help="The server's key."
    ),
    prompt: str = typer.Option(PROMPT, help="What to ask.", show_default=False),
    max_tokens: int = typer.Option(64, min=1, help="Longest answer, in tokens."),
    repeat: int = typer.Option(1, min=1, help="Requests, one after another; the summary is median ± MAD."),
    timeout: float = typer.Option(120.0, min=0.1, help="Seconds after which a request counts as failed."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON with every chunk's time instead."),
) -> None:
    """Send one request to a server and say where its time went."""
    result = run(
        send_probe(
            url,
            model=model,
            api_key=api_key,
            prompt=prompt,
            max_tokens=max_tokens,
            repeat=repeat,
            time_limit=timeout,
        )
    )
    if as_json:
        print(json.dumps(result.json(), indent=2, ensure_ascii=False))
    else:
        _print(result, Console(highlight=False))
    if any(not record.ok for record in result.records):
        raise typer.Exit(1)


def _print(result: Probe, console: Console) -> None:
    rows = [summary(record) for record in result.records]
    good = [row for row in rows if row["error"] is None]
    console.print(f"\n[bold]{result.model}[/bold] at {result.url}\n")
    for number, row in enumerate(rows, start=1):
        if row["error"]:
            console.print(f"[red]request {number} failed:[/red] {row['error']}")
    if not good:
        return

    def figure(key: str, unit: str) -> str:
        value = metrics.spread(row[key] for row in good)
        if value is None:
            return "–"
        text = f"{value.median:.1f}"
        return f"{text} ± {value.mad:.1f} {unit}" if len(good) > 1 else f"{text} {unit}"

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    labels = {"duration": "total"}
    for key in ("ttft", "ttfvt", "ttfb", "tpot", "icl_max", "duration"):
        metric = metrics.METRICS[key]
        if key == "ttfvt" and figure(key, "ms") == figure("ttft", "ms"):
            continue  # no reasoning tokens: nothing new to say
        table.add_row(labels.get(key, metric.label), figure(key, metric.unit), metric.formula)
    table.add_row("rate", figure("tokens_per_second", "tok/s"), "output tokens / total")
    last = good[-1]
    table.add_row("output", _count(last["completion_tokens"]), f"finish reason: {last['finish_reason']}")
    table.add_row(
        "prompt", _count(last["prompt_tokens"]), f"of which cached: {_count(last['cached_tokens'])}"
    )
    console.print(table)
    _print_parts([row["parts"] for row in good if row["parts"]], console)
    if len(good) > 1:
        console.print(f"\n[dim]median ± MAD of {len(good)} requests[/dim]")
    if result.warning():
        console.print(f"\n[yellow]do not trust these figures: {result.warning()}[/yellow]")


def _print_parts(parts: list[dict[str, float]], console: Console) -> None:
    """Bars for where the time to the first token went."""
    if not parts:
        console.print("\n[dim]The server does not say where the first token's time went.[/dim]")
        return
    console.print("\n[bold]Where the first token's time went[/bold]")
    middle = {name: metrics.spread(p.get(name) for p in parts) for name in (*PARTS, "first_decode")}
    total = sum(value.median for name, value in middle.items() if value and name in PARTS) or 1.0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(width=24, style="cyan")
    table.add_column(style="dim")
    for name, text in PARTS.items():
        value = middle[name]
        if value:
            table.add_row(name, f"{value.median:.1f} ms", "█" * round(24 * value.median / total) or "▏", text)
    if middle["first_decode"]:
        after = "then: first token → second token"
        table.add_row("first decode", f"{middle['first_decode'].median:.1f} ms", "", after)
    console.print(table)


def _count(value: int | None) -> str:
    return "not said" if value is None else f"{value} tokens"
