"""`firsttoken serve MODEL`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from firsttoken.cli.legacy_flags import TranslatingCommand
from firsttoken.cli.options import configured
from firsttoken.engine.config import EngineConfig
from firsttoken.server.config import ServerConfig


def register(app: typer.Typer) -> None:
    app.command("serve", cls=TranslatingCommand)(configured(serve))


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a hub id (org/name) or a built-in name (smollm2-135m)."
        ),
    ],
    engine: EngineConfig,
    server: ServerConfig,
) -> None:
    """Serve a model over the OpenAI API, tuned for the first token."""
    from firsttoken.backends.base import BackendError
    from firsttoken.backends.embedded import EmbeddedBackend
    from firsttoken.models import HUB_ID, resolve
    from firsttoken.server.run import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if server.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    # One prompt at a time is tokenised: its threads would only take cores from the engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = resolve(model)
    engine.model = str(folder)
    if engine.draft and HUB_ID.fullmatch(engine.draft) and not Path(engine.draft).is_dir():
        engine.draft = str(resolve(engine.draft))

    def make_backend(on_fatal: Callable[[str], None]) -> EmbeddedBackend:
        return EmbeddedBackend(engine, on_fatal=on_fatal)

    try:
        code = run(server, folder, model, make_backend)
    except BackendError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(code)
