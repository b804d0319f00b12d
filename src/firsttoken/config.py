"""Every setting once: a dataclass field is a flag, a TOML key and an environment variable.

A field `max_num_seqs` made with `firsttoken.engine.config.setting(...)` is `--max-num-seqs` on the command
line, `max_num_seqs = 8` in the file given with `--config`, and FIRSTTOKEN_MAX_NUM_SEQS in the environment.
The flag wins over the environment, the environment over the file, the file over the default. All three are
read by one parser, so they take the same spellings and fail with the same words.

Metadata of a field: `help`; `flag`, its name if it is not the field's, or False for no flag, key or variable;
`unit`, "ms" or "s" for a duration written as 500ms or 1.5s; `min` and `max`, the limits of a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.engine.config import ConfigError

PREFIX = "FIRSTTOKEN_"
OTHER_VARIABLES = ("FIRSTTOKEN_HOME",)
"""Variables of ours that are not settings of a command."""

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Setting:
    """A field of a config dataclass, and its other names."""

    field: str
    key: str
    """In TOML; the flag and the variable follow from it."""
    type: Any
    """Without `| None`: int, float, bool, str, Path, a Literal, `int | Literal[…]`, list[…] or dict."""
    default: Any
    help: str
    unit: str | None
    min: float | None
    max: float | None

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is list


def settings_of(*configs: type) -> dict[str, Setting]:
    """The settings of these dataclasses by field name. A field that two of them share is one setting."""
    found: dict[str, Setting] = {}
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            flag = field.metadata.get("flag")
            if "help" not in field.metadata or flag is False:
                continue
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            found.setdefault(
                field.name,
                Setting(
                    field=field.name,
                    key=(flag or field.name).replace("-", "_"),
                    type=without_none(hints[field.name]),
                    default=default,
                    help=field.metadata["help"],
                    unit=field.metadata.get("unit"),
                    min=field.metadata.get("min"),
                    max=field.metadata.get("max"),
                ),
            )
    return found


def without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
        if len(rest) == 1:
            return rest[0]
        if len(rest) == 2 and int in rest and any(typing.get_origin(arm) is typing.Literal for arm in rest):
            return hint
        raise TypeError(f"a setting has one type, not {hint}")
    return hint


def load(
    configs: Iterable[type],
    flags: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """An instance of each config dataclass from the flags given (field → text or bool), environment, file.

    Raises ConfigError, one line with the place: an unknown key (and the nearest known one), a bad value.
    """
    configs = list(configs)
    environment = os.environ if environment is None else environment
    settings = settings_of(*configs)
    from_file = read_file(file, settings) if file else {}
    check_variables(environment, settings)
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if flags.get(name) is not None:
            values[name] = parse(setting, flags[name], setting.flag)
        elif setting.variable in environment:
            values[name] = parse(setting, environment[setting.variable], setting.variable)
        elif name in from_file:
            values[name] = parse(setting, from_file[name], f"{setting.key} in {file}")
        else:
            values[name] = setting.default
        if setting.is_list:
            values[name] = list(values[name])
    return [
        config(
            **{field.name: values[field.name] for field in dataclasses.fields(config) if field.name in values}
        )
        for config in configs
    ]


def read_file(file: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Field → value of a TOML file. Keys may be written with hyphens, as the flags are."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not TOML: {error}") from None
    fields = {setting.key: name for name, setting in settings.items()}
    values = {}
    for key, value in content.items():
        field = fields.get(key.replace("-", "_"))
        if field is None:
            raise ConfigError(f"{file}: unknown key {key!r}{did_you_mean(key.replace('-', '_'), fields)}")
        values[field] = value
    return values


def check_variables(environment: Mapping[str, str], settings: Mapping[str, Setting]) -> None:
    """Refuses a misspelt variable. One that resembles no setting may belong to another command."""
    known = {setting.variable for setting in settings.values()}
    for name in environment:
        if name.startswith(PREFIX) and name not in known and name not in OTHER_VARIABLES:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.92)
            if close:
                raise ConfigError(f"unknown environment variable {name}: did you mean {close[0]}?")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or what there is if nothing is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else "; known are " + ", ".join(sorted(known))


def parse(setting: Setting, raw: Any, place: str) -> Any:
    """The value of `setting` written as `raw`: text from a flag or variable, or a TOML value.

    `place` is where it was written, for the error.
    """
    if setting.is_list:
        (kind,) = typing.get_args(setting.type)
        return [convert(kind, item, setting, place) for item in items(raw)]
    if isinstance(raw, list):
        raise ConfigError(f"{place} takes one value, not a list")
    return convert(setting.type, raw, setting, place)


def items(raw: Any) -> list[Any]:
    """The items of a list setting: a list (of repeated flags, or from TOML), JSON, or separated by commas."""
    if isinstance(raw, list):
        return [item for part in raw for item in (items(part) if isinstance(part, str) else [part])]
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        try:
            decoded = json.loads(raw)
        except ValueError:
            return [raw]
        return decoded if isinstance(decoded, list) else [raw]
    return [item.strip() for item in raw.split(",") if item.strip()] if isinstance(raw, str) else [raw]


def convert(kind: Any, raw: Any, setting: Setting, place: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if raw not in choices:
            raise ConfigError(f"{place}: {raw!r} is not one of {', '.join(map(str, choices))}")
        return raw
    if typing.get_origin(kind) in (typing.Union, types.UnionType):  # a number or a word
        words = next(typing.get_args(arm) for arm in typing.get_args(kind) if arm is not int)
        if raw in words:
            return raw
        try:
            return convert(int, raw, setting, place)
        except ConfigError as error:
            raise ConfigError(f"{error}; {' or '.join(words)} is possible too") from None
    if kind is bool:
        return boolean(raw, place)
    if kind is int:
        return limited(whole_number(raw, place), setting, place)
    if kind is float:
        return limited(
            duration(raw, setting.unit, place) if setting.unit else number(raw, place), setting, place
        )
    if kind is dict or typing.get_origin(kind) is dict:
        return json_object(raw, place)
    if not isinstance(raw, str):
        raise ConfigError(f"{place} takes text, not {raw!r}: put it in quotes")
    return Path(os.path.expanduser(raw)) if kind is Path else raw


def boolean(raw: Any, place: str) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in YES + NO:
        return raw.lower() in YES
    raise ConfigError(f"{place}: {raw!r} is not true or false")


def whole_number(raw: Any, place: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    text = raw.replace("_", "").replace(",", "") if isinstance(raw, str) else ""
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([kKmM])", text):  # as vLLM: 4k is 4,000 and 4K is 4,096
        factor = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[match[2]]
        return int(float(match[1]) * factor)
    raise ConfigError(f"{place}: {raw!r} is not a whole number")


def number(raw: Any, place: str) -> float:
    if not isinstance(raw, bool):
        try:
            value = float(raw)
        except (TypeError, ValueError):
            value = math.nan
        if math.isfinite(value):
            return value
    raise ConfigError(f"{place}: {raw!r} is not a number")


def duration(raw: Any, unit: str, place: str) -> float:
    """500ms, 1.5s, 2m … in `unit`. A bare number is refused: half a second and 500 ms are easily confused."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", raw.lower()) if isinstance(raw, str) else None
    )
    if not match or match[2] not in SECONDS:
        raise ConfigError(f"{place}: {raw!r} is not a time; write it with its unit, as 500ms or 1.5s")
    return float(match[1]) * SECONDS[match[2]] / SECONDS[unit]


def json_object(raw: Any, place: str) -> dict[str, Any]:
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place} takes a JSON object, as '{{\"key\": 1}}'")
    return value


def limited(value: Any, setting: Setting, place: str) -> Any:
    if setting.min is not None and value < setting.min:
        raise ConfigError(f"{place}: {value:g} is too small, the least is {setting.min:g}")
    if setting.max is not None and value > setting.max:
        raise ConfigError(f"{place}: {value:g} is too large, the most is {setting.max:g}")
    return value
