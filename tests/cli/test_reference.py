"""docs/cli.md is what the commands say of themselves."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date():
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_cli.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
