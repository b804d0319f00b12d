"""The wheel and the sdist hold the product and nothing else, and the wheel runs."""

import os
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both, built by this environment's own hatchling."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True, capture_output=True
    )
    return folder


def test_the_wheel_holds_the_package_with_its_data_and_licences(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"firsttoken"}
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.startswith("firsttoken/")} == expected
    assert "firsttoken/py.typed" in names
    assert {name.rsplit("/")[-1] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_sdist_can_be_tested(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "NOTICE",
        "Makefile",
        "tests/packaging/test_wheel.py",
    } <= names
    assert not any(name.startswith((".venv", "out/", ".git/", "dist/")) for name in names)


def test_the_wheel_runs_where_only_it_is_installed(built, tmp_path):
    """In an environment of its own, which finds the dependencies, but not this checkout, in the current one."""
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    target = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, capture_output=True)
    # a .pth line adds the folder without running the .pth files in it: the editable install stays out
    dependencies = {
        *site.getsitepackages(),
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
    }
    Path(target, "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")

    def run(*arguments):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
        ).stdout

    assert run(python, "-c", "import firsttoken; print(firsttoken.__file__)").startswith(str(tmp_path))
    script = tmp_path / "venv" / "bin" / "firsttoken"
    assert run(script, "--version").startswith("firsttoken ")
    for command in ("serve", "pull", "probe", "bench", "gateway"):
        assert "Usage: firsttoken" in run(script, command, "--help")
    code = "from firsttoken.bench import prompts; print(len(prompts.load().measured))"  # data files
    assert int(run(python, "-c", code)) > 0
    run(python, "-c", "from firsttoken.engine import Engine")
