"""Settings from flags, environment and file: what wins, what is refused, and with which words."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firsttoken.config import load, settings_of
from firsttoken.engine.config import ConfigError, EngineConfig, setting


@dataclass(kw_only=True)
class Kinds:
    """A setting of every kind."""

    hidden: str = setting("kept", "Not a flag.", flag=False)
    count: int = setting(4, "A count.", min=1, max=10**9)
    share: float = setting(0.5, "A share.", min=0, max=1)
    fast: bool = setting(True, "A switch.")
    kind: Literal["red", "green"] = setting("red", "A choice.")
    limit_ms: float | None = setting(None, "A time.", flag="limit", unit="ms")
    wait_s: float = setting(30.0, "A time.", flag="wait", unit="s")
    names: list[str] = setting((), "Names.")
    folder: Path | None = setting(None, "A path.")
    extra: dict[str, int] | None = setting(None, "JSON.")


@dataclass(kw_only=True)
class Other:
    count: int = setting(4, "The same setting as that of Kinds.", min=1)
    colour: str = setting("blue", "Another.")


def read(flags=None, environment=None, toml=None, tmp_path=None):
    file = None
    if toml is not None:
        file = tmp_path / "firsttoken.toml"
        file.write_text(toml)
    return load([Kinds], flags or {}, file, environment or {})[0]


def refusal(**sources):
    with pytest.raises(ConfigError) as error:
        read(**sources)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults():
    assert read() == Kinds(names=[])


def test_flag_over_environment_over_file_over_default(tmp_path):
    toml, environment, flags = "count = 1", {"FIRSTTOKEN_COUNT": "2"}, {"count": "3"}
    assert read(flags, environment, toml, tmp_path).count == 3
    assert read({}, environment, toml, tmp_path).count == 2
    assert read({}, {}, toml, tmp_path).count == 1
    assert read({"count": None}, {}, "", tmp_path).count == 4


SPELLINGS = [
    # field, text of a flag or variable, TOML, value
    ("count", "12", "12", 12),
    ("count", "4k", '"4k"', 4000),
    ("count", "4K", '"4K"', 4096),
    ("count", "1,000", "1_000", 1000),
    ("share", "0.25", "0.25", 0.25),
    ("share", "1", "1", 1.0),
    ("fast", "false", "false", False),
    ("fast", "ON", "true", True),
    ("kind", "green", '"green"', "green"),
    ("limit_ms", "500ms", '"500ms"', 500.0),
    ("limit_ms", "1.5s", '"1.5 s"', 1500.0),
    ("wait_s", "2m", '"2min"', 120.0),
    ("wait_s", "250ms", '"250ms"', 0.25),
    ("names", "a, b", '["a", "b"]', ["a", "b"]),
    ("names", '["*"]', '"*"', ["*"]),
    ("folder", "/x/y", '"/x/y"', Path("/x/y")),
    ("extra", '{"a": 1}', "{a = 1}", {"a": 1}),
]
KEYS = {"limit_ms": "limit", "wait_s": "wait"}


@pytest.mark.parametrize(("field", "text", "toml", "value"), SPELLINGS)
def test_one_spelling_everywhere(tmp_path, field, text, toml, value):
    key = KEYS.get(field, field)
    for config in (
        read(flags={field: text}),
        read(environment={f"FIRSTTOKEN_{key.upper()}": text}),
        read(toml=f"{key} = {toml}", tmp_path=tmp_path),
    ):
        assert getattr(config, field) == value
        assert type(getattr(config, field)) is type(value)


BAD = [
    ("count", "many", "'many' is not a whole number"),
    ("count", "1.5", "'1.5' is not a whole number"),
    ("count", "", "'' is not a whole number"),
    ("count", "0", "0 is too small, the least is 1"),
    ("share", "2", "2 is too large, the most is 1"),
    ("share", "nan", "'nan' is not a number"),
    ("fast", "maybe", "'maybe' is not true or false"),
    ("kind", "blue", "'blue' is not one of red, green"),
    ("limit_ms", "500", "'500' is not a time; write it with its unit, as 500ms or 1.5s"),
    ("limit_ms", "-1s", "'-1s' is not a time"),
    ("limit_ms", "5 parsecs", "'5 parsecs' is not a time"),
    ("extra", "[1]", "takes a JSON object"),
    ("extra", "{", "is not JSON"),
]


@pytest.mark.parametrize(("field", "text", "complaint"), BAD)
def test_a_bad_value_is_named_with_its_place(tmp_path, field, text, complaint):
    key = KEYS.get(field, field)
    sources = {
        f"--{key}": {"flags": {field: text}},
        f"FIRSTTOKEN_{key.upper()}": {"environment": {f"FIRSTTOKEN_{key.upper()}": text}},
        f"{key} in {tmp_path / 'firsttoken.toml'}": {"toml": f"{key} = '{text}'", "tmp_path": tmp_path},
    }
    for place, source in sources.items():
        message = refusal(**source)
        assert message.startswith(place)
        assert complaint in message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("cuont = 1", "unknown key 'cuont' (did you mean 'count'?)"),
        ("limit_ms = '5s'", "unknown key 'limit_ms' (did you mean 'limit'?)"),
        (
            "hidden = 'x'",
            "unknown key 'hidden'; known are count, extra, fast, folder, kind, limit, names, share, wait",
        ),
        ("[count]\na = 1", "is not a whole number"),
        ("count = [1, 2]", "takes one value, not a list"),
        ("count = true", "True is not a whole number"),
        ("folder = 3", "takes text, not 3: put it in quotes"),
        ("names = [1]", "takes text, not 1"),
        ("count = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, toml, message):
    assert message in refusal(toml=toml, tmp_path=tmp_path)


def test_keys_may_have_hyphens_as_flags_do(tmp_path):
    (tmp_path / "c.toml").write_text("max-num-seqs = 3\nmax_num_batched_tokens = 64\n")
    (config,) = load([EngineConfig], {}, tmp_path / "c.toml", {})
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 64)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--config .*nix\.toml: No such file"):
        load([Kinds], {}, tmp_path / "nix.toml", {})


def test_a_misspelt_variable_is_refused_and_those_of_others_are_not():
    with pytest.raises(ConfigError, match=r"FIRSTTOKEN_MAX_NUM_SEQ: did you mean FIRSTTOKEN_MAX_NUM_SEQS\?"):
        load([EngineConfig], {}, None, {"FIRSTTOKEN_MAX_NUM_SEQ": "4"})
    load(
        [EngineConfig], {}, None, {"FIRSTTOKEN_HOME": "/x", "FIRSTTOKEN_COLOUR": "blue", "MAX_NUM_SEQS": "4"}
    )


def test_two_configs_share_a_setting():
    kinds, other = load([Kinds, Other], {"count": "7", "colour": "red"}, None, {})
    assert (kinds.count, other.count, other.colour) == (7, 7, "red")


def test_every_instance_has_its_own_lists():
    first, second = (load([Kinds], {}, None, {})[0] for _ in range(2))
    first.names.append("a")
    assert second.names == []


@given(st.floats(min_value=0.001, max_value=1e6), st.sampled_from(["us", "ms", "s", "m", "h", "d"]))
def test_a_time_is_the_same_in_every_unit(value, unit):
    seconds = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    config = read(flags={"limit_ms": f"{value:.6f}{unit}"})
    assert config.limit_ms == pytest.approx(float(f"{value:.6f}") * seconds * 1000, rel=1e-12)


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_one_line(text):
    for field in settings_of(Kinds):
        try:
            read(flags={field: text})
        except ConfigError as error:
            message = str(error)
        else:
            continue
        assert message.splitlines() == [message]


def test_every_setting_of_the_product_has_help_and_one_place():
    from firsttoken.server.config import ServerConfig

    settings = settings_of(EngineConfig, ServerConfig)
    assert len({setting.flag for setting in settings.values()}) == len(settings)
    for item in settings.values():
        assert re.fullmatch(r"--[a-z][a-z0-9-]+", item.flag)
        assert item.help.endswith((".", ")"))
