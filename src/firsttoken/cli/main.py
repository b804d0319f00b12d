"""The `firsttoken` command. Its subcommands are loaded only when they run, so that `--help` is instant.

Convention: the command NAME lives in `firsttoken/cli/NAME.py`, which has

    def register(app: typer.Typer) -> None:

and adds exactly one command, or one group of commands, called NAME to `app`:

    def register(app: typer.Typer) -> None:
        app.command("probe")(probe)                       # one command
        app.add_typer(keys, name="keys")                  # a group: keys is a typer.Typer()

The module may import what it likes: it is imported only for its own command. Its one-line summary stands in
COMMANDS below, because `firsttoken --help` must show it without that import (a test holds the two equal: the
summary is the first line of the command's docstring or help).

Errors: raise `firsttoken.engine.config.ConfigError("one line that names what to change")` anywhere; it is
printed as `error: …` and the exit code is 2. Ctrl-C exits with 130. A command that failed for another
reason raises `typer.Exit(1)` after saying why on stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from firsttoken import __version__
from firsttoken.engine.config import ConfigError

COMMANDS = {
    "serve": "Serve a model over the OpenAI API, tuned for the first token.",
    "pull": "Fetch a model once, and say where it is.",
    "probe": "Send one request to a server and say where its time went.",
    "bench": "Measure: what each optimisation gives, as a table and a report.",
    "draft": "Make, check and measure drafts for speculation.",
    "tune": "Find the settings that meet a TTFT limit on this machine.",
    "gateway": "One address before many models: keys, limits, usage, latency.",
    "up": "Serve a model behind a gateway, with one command.",
    "keys": "API keys of the gateway.",
    "plans": "Plans of the gateway: what a key may use.",
    "doctor": "Say what is wrong with a server, the evidence, and the flag that mends it.",
}
"""Every command in the order of `--help`, with its summary. One without a module is not offered."""

EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def underscores_to_hyphens(name: str) -> str:
    """`--max_num_seqs` is `--max-num-seqs`, as in vLLM."""
    return name.replace("_", "-")


def plain(command: Any) -> Any:
    """The command, with help as plain text: Typer's tables cut long flag names off at 80 columns."""
    command.rich_markup_mode = None
    for child in getattr(command, "commands", {}).values():
        plain(child)
    return command


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and summary, and imports one only to run it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, summary in COMMANDS.items():
            if importlib.util.find_spec(f"firsttoken.cli.{name}"):
                self.commands[name] = TyperCommand(name, help=summary)

    def load(self, name: str) -> None:
        """Replaces the summary of command `name` by the command itself."""
        app = typer.Typer(add_completion=False)
        importlib.import_module(f"firsttoken.cli.{name}").register(app)
        app.callback()(lambda: None)  # so that Typer keeps a lone command inside a group
        self.commands[name] = plain(typer.main.get_group(app).commands[name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in self.commands:
            self.load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_CONFIG) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=LazyGroup,
    name="firsttoken",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": underscores_to_hyphens, "help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"firsttoken {__version__}")
        raise typer.Exit()


@app.callback()
def firsttoken(
    version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """An LLM serving stack for the earliest first token the hardware allows, proven by measurement.

    MODEL is a folder, a hub id, or a built-in name (smollm2-135m).
    """


def main() -> None:
    """The console script."""
    app()
