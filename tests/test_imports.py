"""The HTTP processes hold no weights: importing any module of theirs brings neither torch nor transformers."""

import pkgutil
import subprocess
import sys

import pytest

import firsttoken.bench
import firsttoken.gateway
import firsttoken.observe
import firsttoken.server


@pytest.mark.parametrize(
    "package", [firsttoken.server, firsttoken.gateway, firsttoken.observe, firsttoken.bench]
)
def test_no_torch_in_the_http_processes(package):
    names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    names = [name for name in names if ".migrations." not in name]  # run by Alembic alone
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = sys.modules.keys() & {'torch', 'transformers', 'triton'}\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
