"""`firsttoken gateway`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from firsttoken.cli.options import keyword, option
from firsttoken.config import settings_of
from firsttoken.gateway.config import GatewayConfig, load


def register(app: typer.Typer) -> None:
    app.command("gateway")(gateway)


def gateway(**given: Any) -> None:
    """One address before many models: keys, limits, usage, latency.

    The file given with --config lists the upstreams; see docs/gateway.md. SIGHUP reads it again.
    """
    from firsttoken.gateway.serve import Gateway

    path, new_admin_key = given.pop("config"), given.pop("new_admin_key")
    config = load(path, given)
    if not config.upstreams:
        raise typer.BadParameter("name a file with at least one [[upstreams]] table", param_hint="--config")
    raise typer.Exit(Gateway(config, path, given).run(new_admin_key))


def _parameters() -> list[inspect.Parameter]:
    file = typer.Option(
        "--config", metavar="FILE", help="gateway.toml: upstreams, aliases and any of the settings."
    )
    new_key = typer.Option("--new-admin-key", help="Make another admin key and print it once.")
    return [
        keyword("config", Path | None, file),
        inspect.Parameter(
            "new_admin_key",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, new_key],
        ),
        *(option(setting) for setting in settings_of(GatewayConfig).values()),
    ]


gateway.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
gateway.__annotations__ = {}
