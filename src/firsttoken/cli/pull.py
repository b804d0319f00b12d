"""`firsttoken pull MODEL`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("pull")(pull)


def pull(
    model: str = typer.Argument(help="A built-in name (smollm2-135m), a hub id (org/name) or a folder."),
) -> None:
    """Fetch a model once, and say where it is."""
    from firsttoken.models import resolve

    print(resolve(model))
