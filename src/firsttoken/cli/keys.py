"""`firsttoken keys …`: the keys of a running gateway."""

from __future__ import annotations

import datetime
import re
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from firsttoken.cli.admin_client import KEY_VARIABLE, URL_VARIABLE, call, segment
from firsttoken.engine.config import ConfigError

keys = typer.Typer(
    no_args_is_help=True,
    help=f"API keys of the gateway.\n\nThe gateway's address is {URL_VARIABLE}, the admin key {KEY_VARIABLE}.",
)


def register(app: typer.Typer) -> None:
    app.add_typer(keys, name="keys")


LIMITS = {
    "models": typer.Option(None, "--model", help="A model it may use; repeat for several. Default: all."),
    "plan": typer.Option(None, help="Its plan: models, quotas, priority."),
    "tags": typer.Option(None, "--tag", help="A tag; load-test keeps its traffic out of charts and alerts."),
    "rpm": typer.Option(None, min=0, help="Requests in any 60 seconds."),
    "tpm": typer.Option(None, min=0, help="Tokens in any 60 seconds."),
    "max_concurrency": typer.Option(None, min=0, help="Requests at once; the limit that protects the TTFT."),
    "expires": typer.Option(None, help="When it ends: 2027-01-31, 2027-01-31T12:00Z, or in 12h, 30d."),
    "unlimited": typer.Option(None, help="A limit to remove, as rpm; repeat for several."),
}


@keys.command()
def create(
    name: str = typer.Argument(help="Its name, unique among the live keys."),
    models: list[str] | None = LIMITS["models"],
    plan: str | None = LIMITS["plan"],
    tags: list[str] | None = LIMITS["tags"],
    rpm: int | None = LIMITS["rpm"],
    tpm: int | None = LIMITS["tpm"],
    max_concurrency: int | None = LIMITS["max_concurrency"],
    expires: str | None = LIMITS["expires"],
    admin: bool = typer.Option(False, help="An admin key: it may change keys and plans and see all usage."),
) -> None:
    """Make a key and show it, this once."""
    values = _given(models, plan, tags, rpm, tpm, max_concurrency, expires) | {"name": name}
    if admin:
        values["role"] = "admin"
    print(call("POST", "keys", values)["secret"])


@keys.command("list")
def list_keys(
    revoked: bool = typer.Option(False, help="Show revoked keys too."),
) -> None:
    """List the keys."""
    table = Table(box=None, header_style="bold")
    for column in ("name", "key", "plan", "models", "rpm", "tpm", "at once", "tags", "ends"):
        table.add_column(column)
    for key in call("GET", "keys?revoked=1" if revoked else "keys")["data"]:
        ends = f"revoked {_date(key['revoked_at'])}" if key["revoked_at"] else _date(key["expires_at"])
        tags = ", ".join([*(["admin"] if key["role"] == "admin" else []), *key["tags"]])
        limits = [_number(key[limit]) for limit in ("rpm", "tpm", "max_concurrency")]
        models = "all" if key["models"] is None else ", ".join(key["models"])
        table.add_row(key["name"], key["hint"], key["plan"] or "", models, *limits, tags, ends)
    Console().print(table)


@keys.command()
def show(name: str = typer.Argument(help="Its name or id.")) -> None:
    """Show a key's limits and what it used in the last day."""
    key = call("GET", f"keys/{segment(name)}")
    now = datetime.datetime.now(datetime.UTC).timestamp()
    used = call("GET", f"usage?key={segment(key['id'])}&since={now - 86400:.0f}&load_test=1")["data"]
    table = Table(box=None, show_header=False)
    for field in ("id", "name", "hint", "role", "plan", "models", "tags", "rpm", "tpm", "max_concurrency"):
        table.add_row(field, "–" if key[field] in (None, []) else str(key[field]))
    for kind, quota in key["quotas"].items():
        table.add_row(kind, f"{key['quota_use'].get(kind, {}).get('used', 0):,} of {quota:,} tokens used")
    for field in ("created_at", "expires_at", "revoked_at"):
        table.add_row(field, _date(key[field]) or "–")
    for row in used:
        table.add_row("last 24 h", f"{row['requests']:,} requests, {row['limited']:,} of them limited")
        table.add_row("", f"{row['prompt_tokens']:,} + {row['completion_tokens']:,} tokens")
        if row["ttft_ms"]:
            table.add_row("", "TTFT " + ", ".join(f"{p} {ms:.0f} ms" for p, ms in row["ttft_ms"].items()))
    Console().print(table)


@keys.command()
def update(
    name: str = typer.Argument(help="Its name or id."),
    models: list[str] | None = LIMITS["models"],
    plan: str | None = LIMITS["plan"],
    tags: list[str] | None = LIMITS["tags"],
    rpm: int | None = LIMITS["rpm"],
    tpm: int | None = LIMITS["tpm"],
    max_concurrency: int | None = LIMITS["max_concurrency"],
    expires: str | None = LIMITS["expires"],
    unlimited: list[str] | None = LIMITS["unlimited"],
) -> None:
    """Change a key's limits, plan, models or tags."""
    values = _given(models, plan, tags, rpm, tpm, max_concurrency, expires)
    values |= {
        {"expires": "expires_at"}.get(limit, limit.replace("-", "_")): None for limit in unlimited or []
    }
    if not values:
        raise ConfigError("name what to change, as --rpm 60")
    call("PATCH", f"keys/{segment(name)}", values)


@keys.command()
def rotate(name: str = typer.Argument(help="Its name or id.")) -> None:
    """Replace a key's secret and show the new one, this once; the old one ends at once."""
    print(call("POST", f"keys/{segment(name)}/rotate")["secret"])


@keys.command()
def revoke(name: str = typer.Argument(help="Its name or id.")) -> None:
    """End a key for good."""
    call("POST", f"keys/{segment(name)}/revoke")


def _given(
    models: list[str] | None,
    plan: str | None,
    tags: list[str] | None,
    rpm: int | None,
    tpm: int | None,
    max_concurrency: int | None,
    expires: str | None,
) -> dict[str, Any]:
    values: dict[str, Any] = {"plan": plan, "rpm": rpm, "tpm": tpm, "max_concurrency": max_concurrency}
    values |= {"models": models or None, "tags": tags or None}
    if expires is not None:
        values["expires_at"] = when(expires)
    return {name: value for name, value in values.items() if value is not None}


def when(text: str) -> float:
    """`2027-01-31`, an ISO time, or `30d` from now → seconds since the epoch. Without a zone it is UTC."""
    if match := re.fullmatch(r"(\d+)([mhd])", text):
        seconds = int(match[1]) * {"m": 60, "h": 3600, "d": 86400}[match[2]]
        return datetime.datetime.now(datetime.UTC).timestamp() + seconds
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"--expires {text!r}: write a date as 2027-01-31, or a span as 12h or 30d"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _date(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
