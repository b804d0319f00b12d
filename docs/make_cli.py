"""Writes docs/cli.md from the commands' own help; with --check, only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from firsttoken.cli.main import app

FILE = Path(__file__).with_name("cli.md")
WIDTH = 100


def helps(command: Any, ctx: Any) -> list[tuple[str, str]]:
    """(full name, help text) of `command` and of everything under it."""
    pages = [(ctx.command_path, command.get_help(ctx))]
    for name in list(getattr(command, "commands", {})):
        # resolving, not looking up: that is what loads a command of the top level
        _, child, _ = command.resolve_command(ctx, [name])
        pages += helps(
            child, child.context_class(child, info_name=name, parent=ctx, **child.context_settings)
        )
    return pages


def text() -> str:
    root = get_command(app)
    settings = {**root.context_settings, "max_content_width": WIDTH, "terminal_width": WIDTH}
    ctx = root.context_class(root, info_name="firsttoken", **settings)
    sections = [f"## {name}\n\n```\n{page.rstrip()}\n```\n" for name, page in helps(root, ctx)]
    return "# The command line\n\nMade by `make docs` from the commands' own help.\n\n" + "\n".join(sections)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        sys.exit("docs/cli.md differs from the commands' help: run `make docs`")
