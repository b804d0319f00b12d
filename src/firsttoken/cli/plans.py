"""`firsttoken plans …`: the plans of a running gateway."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from firsttoken.cli.admin_client import KEY_VARIABLE, URL_VARIABLE, call, segment
from firsttoken.engine.config import ConfigError

plans = typer.Typer(
    no_args_is_help=True,
    help="Plans of the gateway: what a key may use.\n\n"
    f"The gateway's address is {URL_VARIABLE}, the admin key {KEY_VARIABLE}.",
)

QUOTAS = ("quota_5h", "quota_week", "quota_month")


def register(app: typer.Typer) -> None:
    app.add_typer(plans, name="plans")


FIELDS = {
    "models": typer.Option(None, "--model", help="A model it includes; repeat for several. Default: all."),
    "quota_5h": typer.Option(None, "--quota-5h", min=0, help="Tokens per 5 hours."),
    "quota_week": typer.Option(None, min=0, help="Tokens per week."),
    "quota_month": typer.Option(None, min=0, help="Tokens per month."),
    "priority": typer.Option(
        None, help="interactive (first), agent, or load-test (last). Default: interactive."
    ),
    "upstream": typer.Option(None, help="Serve it from this upstream only."),
    "unlimited": typer.Option(None, help="A quota, models or upstream to remove; repeat for several."),
}


@plans.command()
def create(
    name: str = typer.Argument(help="Its name."),
    models: list[str] | None = FIELDS["models"],
    quota_5h: int | None = FIELDS["quota_5h"],
    quota_week: int | None = FIELDS["quota_week"],
    quota_month: int | None = FIELDS["quota_month"],
    priority: str | None = FIELDS["priority"],
    upstream: str | None = FIELDS["upstream"],
) -> None:
    """Make a plan."""
    call(
        "POST",
        "plans",
        _given(models, quota_5h, quota_week, quota_month, priority, upstream) | {"name": name},
    )


@plans.command()
def update(
    name: str = typer.Argument(help="Its name."),
    models: list[str] | None = FIELDS["models"],
    quota_5h: int | None = FIELDS["quota_5h"],
    quota_week: int | None = FIELDS["quota_week"],
    quota_month: int | None = FIELDS["quota_month"],
    priority: str | None = FIELDS["priority"],
    upstream: str | None = FIELDS["upstream"],
    unlimited: list[str] | None = FIELDS["unlimited"],
) -> None:
    """Change a plan; its keys follow at once."""
    values = _given(models, quota_5h, quota_week, quota_month, priority, upstream)
    values |= {field.replace("-", "_"): None for field in unlimited or []}
    if not values:
        raise ConfigError("name what to change, as --quota-week 1000000")
    call("PATCH", f"plans/{segment(name)}", values)


@plans.command("list")
def list_plans() -> None:
    """List the plans."""
    table = Table(box=None, header_style="bold")
    for column in ("name", "priority", "models", "5 hours", "week", "month", "upstream"):
        table.add_column(column)
    for plan in call("GET", "plans")["data"]:
        models = "all" if plan["models"] is None else ", ".join(plan["models"])
        quotas = ["–" if plan[quota] is None else f"{plan[quota]:,}" for quota in QUOTAS]
        table.add_row(plan["name"], plan["priority"], models, *quotas, plan["upstream"] or "")
    Console().print(table)


@plans.command()
def delete(name: str = typer.Argument(help="Its name.")) -> None:
    """Delete a plan that no key uses."""
    call("DELETE", f"plans/{segment(name)}")


def _given(
    models: list[str] | None,
    quota_5h: int | None,
    quota_week: int | None,
    quota_month: int | None,
    priority: str | None,
    upstream: str | None,
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "models": models or None,
        "quota_5h": quota_5h,
        "quota_week": quota_week,
        "quota_month": quota_month,
        "priority": priority,
        "upstream": upstream,
    }
    return {name: value for name, value in values.items() if value is not None}
