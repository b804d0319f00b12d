"""gateway.toml, variables and flags; and the commands against a running gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firsttoken.cli.keys import when
from firsttoken.engine.config import ConfigError
from firsttoken.gateway.config import load, replaced, restart_needed

from .running import GatewayProgram, chat

UPSTREAM = '[[upstreams]]\nname = "a"\nbase_url = "http://127.0.0.1:1/v1/"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "gateway.toml"
    path.write_text(text)
    return path


def test_flags_win_then_variables_then_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'port = 1\nidle = "5s"\nretries = 3\n' + UPSTREAM)
    config = load(path, {"port": "3"}, {"FIRSTTOKEN_PORT": "2", "FIRSTTOKEN_IDLE": "7s"})
    assert (config.gateway.port, config.gateway.idle, config.gateway.retries) == (3, 7.0, 3)
    assert config.upstreams[0].root == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot = 1", "port"),
        ("idle = 5", "idle"),
        ("port = 70000", "port"),
        ("[[upstreams]]\nname = 'a'", "base_url"),
        (UPSTREAM + UPSTREAM, "'a'"),
        (UPSTREAM + "url = 'x'", "url"),
        (UPSTREAM.replace("http:", "ftp:"), "base_url"),
        (UPSTREAM + "weight = 0", "weight"),
        (UPSTREAM + "api_key_env = 'NOT_SET_ANYWHERE'", "NOT_SET_ANYWHERE"),
        (UPSTREAM + "api_key_file = '/nowhere'", "api_key_file"),
        ("[aliases.chat]\nfallbacks = ['x']", "model"),
        ("root_path = 'api/'", "root_path"),
        ("max_streams = 9000", "max_connections"),
        ("port = ", "TOML"),
    ],
)
def test_a_wrong_file_gets_one_line_that_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as wrong:
        load(written(tmp_path, text), {}, {})
    assert "\n" not in str(wrong.value)


def test_a_reload_keeps_what_needs_a_restart() -> None:
    old, new = load(None, {"port": "1"}, {}).gateway, load(None, {"port": "2", "idle": "9s"}, {}).gateway
    assert restart_needed(old, new) == ["port"]
    kept = replaced(old, new)
    assert (kept.port, kept.idle) == (1, 9.0)


def test_the_example_loads() -> None:
    config = load(Path(__file__).parents[2] / "examples" / "gateway.toml", {}, {})
    assert [upstream.name for upstream in config.upstreams] == ["embedded", "vllm"]
    assert config.aliases["chat"].fallbacks == ["smollm2-135m"]


def test_when() -> None:
    assert when("2027-01-31") == when("2027-01-31T00:00:00Z")
    assert when("1d") - when("12h") == pytest.approx(43_200, abs=5)
    with pytest.raises(ConfigError, match="soon"):
        when("soon")


def command(gateway: GatewayProgram, *arguments: str, key: str | None = None) -> tuple[int, str]:
    environment = {
        "FIRSTTOKEN_GATEWAY_URL": gateway.url,
        "FIRSTTOKEN_ADMIN_KEY": key or gateway.admin,
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, "-m", "firsttoken", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, done.stdout.strip() + done.stderr.strip()


def test_the_commands_make_change_and_end_keys_and_plans(gateway: GatewayProgram) -> None:
    assert command(gateway, "plans", "create", "team", "--quota-week", "5000", "--priority", "agent") == (
        0,
        "",
    )
    code, secret = command(
        gateway, "keys", "create", "cli", "--plan", "team", "--rpm", "7", "--model", "mock"
    )
    assert code == 0
    assert gateway.call("POST", "/v1/chat/completions", chat(), secret)[0] == 200
    code, shown = command(gateway, "keys", "show", "cli")
    assert code == 0
    assert "of 5,000 tokens" in shown
    assert secret not in shown
    assert command(gateway, "keys", "update", "cli", "--rpm", "9", "--unlimited", "models")[0] == 0
    _status, key = gateway.call("GET", "/admin/v1/keys/cli")
    assert (key["rpm"], key["models"], key["plan"]) == (9, None, "team")
    code, listed = command(gateway, "keys", "list")
    assert "cli" in listed
    assert "team" in listed
    code, error = command(gateway, "plans", "delete", "team")
    assert code == 2
    assert "used by cli" in error
    assert command(gateway, "keys", "revoke", "cli") == (0, "")
    assert gateway.call("POST", "/v1/chat/completions", chat(), secret)[0] == 401
    assert command(gateway, "plans", "delete", "team")[0] == 0
    code, error = command(gateway, "keys", "list", key="ft-wrong")
    assert code == 2
    assert error == "error: Incorrect API key provided."


def test_a_port_in_use_and_no_upstreams_get_one_line(gateway: GatewayProgram, tmp_path: Path) -> None:
    port = gateway.url.rpartition(":")[2]
    path = written(tmp_path, f"port = {port}\nstate_dir = '{tmp_path}'\n" + UPSTREAM)
    code, said = command(gateway, "gateway", "--config", str(path))
    assert code == 2
    assert f"--port {port}" in said
    code, said = command(gateway, "gateway", "--state-dir", str(tmp_path))
    assert code == 2
    assert "[[upstreams]]" in said
