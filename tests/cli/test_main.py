"""The `firsttoken` command as a user runs it."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from firsttoken import __version__
from firsttoken.cli.main import COMMANDS, app

HERE = [name for name in COMMANDS if importlib.util.find_spec(f"firsttoken.cli.{name}")]


def firsttoken(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "firsttoken", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_version():
    assert firsttoken("--version").stdout == f"firsttoken {__version__}\n"


def test_help_lists_every_command_there_is_without_loading_any():
    code = (
        "import sys; from firsttoken.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = [name for name in sys.modules if name.startswith('firsttoken.')]\n"
        "heavy = sys.modules.keys() & {'torch', 'numpy', 'fastapi', 'aiohttp', 'rich'}\n"
        "print(*sorted(loaded), *heavy, sep='\\n', file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in HERE:
        assert f"\n  {name} " in result.stdout
        assert COMMANDS[name] in " ".join(result.stdout.split())
    assert result.stderr.split() == [
        "firsttoken.cli",
        "firsttoken.cli.main",
        "firsttoken.engine",
        "firsttoken.engine.config",
        "firsttoken.engine.request",
    ]


@pytest.mark.parametrize("name", HERE)
def test_a_command_says_of_itself_what_the_list_says(name):
    """And it adds one command or group, of its own name."""
    holder = typer.Typer()
    importlib.import_module(f"firsttoken.cli.{name}").register(holder)
    holder.callback()(lambda: None)
    commands = typer.main.get_group(holder).commands
    assert list(commands) == [name]
    assert commands[name].help.strip().splitlines()[0] == COMMANDS[name]


def test_a_mistyped_command_is_corrected():
    result = firsttoken("pul")
    assert result.returncode == 2
    assert "Did you mean 'pull'?" in result.stderr


def test_flags_may_be_written_with_underscores(tmp_path):
    for flag in ("--max_num_seqs", "--max-num-seqs"):
        result = firsttoken("serve", str(tmp_path), flag, "none")
        assert (result.returncode, result.stderr) == (
            2,
            "error: --max-num-seqs: 'none' is not a whole number\n",
        )


def test_the_last_of_repeated_flags_wins(tmp_path):
    result = firsttoken("serve", str(tmp_path), "--max-num-seqs", "none", "--max-num-seqs", "4")
    assert result.stderr == f"error: {tmp_path} has no config.json: it is not a Hugging Face model folder\n"


def test_a_config_error_is_one_line_and_status_2():
    result = firsttoken("pull", "./missing")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: model folder ./missing does not exist\n"


def test_ctrl_c_ends_without_a_traceback(tmp_path):
    """In the middle of a pull that waits for another one, which holds the lock."""
    import fcntl

    stored = tmp_path / "models" / "org"
    stored.mkdir(parents=True)
    with (stored / ".name.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-m", "firsttoken", "pull", "org/name"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FIRSTTOKEN_HOME": str(tmp_path)},
        )
        assert process.stderr.readline() == "another process is fetching org/name: waiting for it\n"
        time.sleep(0.2)  # into the wait itself; a signal before it would do as well
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr


def test_help_names_no_flag_in_part():
    result = CliRunner().invoke(app, ["serve", "--help"], terminal_width=80)
    assert "--no-enable-chunked-prefill" in result.output
    assert "--max-num-batched-tokens" in result.output
    assert "…" not in result.output
