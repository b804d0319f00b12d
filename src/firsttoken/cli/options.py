"""Config dataclasses → flags of a Typer command.

    def serve(model: str, engine: EngineConfig, server: ServerConfig) -> None: ...

    def register(app):
        app.command("serve")(configured(serve))

gives `serve` every flag of both dataclasses, and `--config FILE`; the function is called with finished
instances (see `firsttoken.config` for what wins over what).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from firsttoken.config import Setting, load, settings_of


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same command, with its parameters of a config dataclass type replaced by that dataclass's flags."""
    signature = inspect.signature(command, eval_str=True)
    configs: dict[str, type] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation)
    }
    settings = settings_of(*configs.values())

    def run(**given: Any) -> Any:
        file = given.pop("config")
        flags = {name: given.pop(name) for name in settings}
        instances = load(configs.values(), flags, file)
        return command(**given, **dict(zip(configs, instances, strict=True)))

    plain = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name not in configs
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=[*plain, *options_for(*configs.values())])  # type: ignore[attr-defined]
    run.__annotations__ = {}  # Typer takes the signature's
    return run


def options_for(*configs: type) -> list[inspect.Parameter]:
    """Typer parameters, one per setting and `--config`. Each is None unless its flag was given."""
    file = typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with any of the settings: --max-num-seqs is max_num_seqs there, and"
        " FIRSTTOKEN_MAX_NUM_SEQS in the environment. Flags win, then the environment.",
    )
    return [*map(option, settings_of(*configs).values()), keyword("config", Path | None, file)]


def option(setting: Setting) -> inspect.Parameter:
    names = setting.flag
    annotation: Any = str
    if setting.type is bool:
        names += f"/--no-{setting.flag.removeprefix('--')}"
        annotation = bool
    elif setting.is_list:
        annotation = list[str]
    info = typer.Option(
        names,
        help=help_with_default(setting),
        metavar=None if setting.type is bool else metavar(setting),
        show_default=False,
    )
    return keyword(setting.field, annotation | None, info)


def keyword(name: str, annotation: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation, info]
    )


def metavar_of_words(literal: Any) -> str:
    return "|".join(map(str, typing.get_args(literal)))


def metavar(setting: Setting) -> str:
    kind = typing.get_args(setting.type)[0] if setting.is_list else setting.type
    if typing.get_origin(kind) is typing.Literal:
        return metavar_of_words(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join("N" if arm is int else metavar_of_words(arm) for arm in typing.get_args(kind))
    if setting.unit:
        return "TIME"
    return {int: "N", float: "X", Path: "PATH", str: "TEXT"}.get(kind, "JSON")


def help_with_default(setting: Setting) -> str:
    """The help text, which ends with the default unless it says itself what happens without the flag."""
    default = setting.default
    if default in (None, "", (), []) or "Default:" in setting.help:
        return setting.help
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{setting.help} Default: {default}."
