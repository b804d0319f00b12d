"""What a model's name means, which folders are models, and which weights they hold."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from firsttoken import models
from firsttoken.engine.config import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FIRSTTOKEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def weights():
    rng = np.random.default_rng(0)
    return {f"layer.{i}.weight": rng.standard_normal((96, 64)).astype(np.float32) for i in range(4)}


def write_model(folder, tensors=None, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    tensors = tensors or weights()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    parts = {f"model-{i}-of-{shards}.safetensors": names[i::shards] for i in range(shards)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- names ---


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_used_as_it_is(home, tmp_path, shards):
    folder = write_model(tmp_path / "mine", shards=shards)
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert models.resolve(str(folder)) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert not home.exists()


def test_a_folder_of_the_current_directory_needs_no_dot(home, tmp_path, monkeypatch):
    write_model(tmp_path / "org" / "mine")
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/mine") == tmp_path / "org" / "mine"
    assert models.model_name("org/mine") == "mine"
    assert models.model_name("./org/mine/") == "mine"


def test_a_stored_hub_model_needs_no_network(home):
    folder = write_model(home / "models" / "org" / "name")
    assert models.resolve("org/name") == folder
    assert models.model_name("org/name") == "org/name"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2-153m", "did you mean smollm2-135m?"),
        ("SmolLM2", "did you mean smollm2-135m?"),
        (
            "nothing like it",
            "unknown model 'nothing like it': give a folder, a hub id (org/name) or one of smollm2-135m",
        ),
        ("", "unknown model ''"),
        ("a/b/c", "unknown model"),
        ("../x/", "does not exist"),
        ("./missing", "model folder ./missing does not exist"),
        ("/missing", "model folder /missing does not exist"),
        ("~/missing-model", "does not exist"),
        ("~nobody-of-that-name/x", "does not exist"),
    ],
)
def test_unknown_names_say_what_is_known(home, name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        models.resolve(name)
    assert expected in one_line(error)


def test_models_already_fetched_are_suggested(home):
    write_model(home / "models" / "org" / "chatty")
    write_model(home / "models" / "org" / ".half.partial")
    assert models.known_names() == ["smollm2-135m", "org/chatty"]
    with pytest.raises(ConfigError, match="did you mean org/chatty"):
        models.resolve("org-chatty")


def test_a_file_is_not_a_model(home, tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="convert it to safetensors") as error:
        models.resolve(str(tmp_path / "model.gguf"))
    one_line(error)


def test_home_is_the_users_cache_unless_set(monkeypatch, tmp_path):
    monkeypatch.delenv("FIRSTTOKEN_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform != "darwin":
        assert models.home() == tmp_path / "firsttoken"
    monkeypatch.setenv("FIRSTTOKEN_HOME", "~/there")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.home() == tmp_path / "there"


# --- broken folders ---


def damage(folder, what):
    file = folder / "model.safetensors"
    match what:
        case "no config":
            (folder / "config.json").unlink()
        case "config cut":
            (folder / "config.json").write_text('{"model_type": ')
        case "config is a list":
            (folder / "config.json").write_text("[]")
        case "no weights":
            file.unlink()
        case "only bin":
            file.rename(folder / "pytorch_model.bin")
        case "weights cut":
            os.truncate(file, file.stat().st_size - 1)
        case "header cut":
            os.truncate(file, 100)
        case "empty weights":
            os.truncate(file, 0)
        case "an error page":
            file.write_text("<html>not found</html>")
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "tokenizer cut":
            (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"vo')


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("no config", "has no config.json"),
        ("config cut", "config.json can't be read"),
        ("config is a list", "config.json is not a JSON object"),
        ("no weights", "has no safetensors weights"),
        ("only bin", "has no safetensors weights (only .bin files: convert them)"),
        ("weights cut", "is not a whole safetensors file"),
        ("header cut", "is not a whole safetensors file"),
        ("empty weights", "is not a whole safetensors file"),
        ("an error page", "is not a whole safetensors file"),
        ("no tokenizer", "has no tokenizer.json: save it with"),
        ("tokenizer cut", "tokenizer.json is cut short"),
    ],
)
def test_a_broken_folder_says_what_is_broken(home, tmp_path, what, expected):
    folder = write_model(tmp_path / "model")
    damage(folder, what)
    with pytest.raises(ConfigError) as error:
        models.resolve(str(folder))
    assert expected in one_line(error)
    assert str(folder) in one_line(error)


def test_a_missing_shard_is_named(home, tmp_path):
    folder = write_model(tmp_path / "model", shards=3)
    (folder / "model-1-of-3.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of 3 weight files, model-1-of-3\.safetensors first"):
        models.resolve(str(folder))


# --- which weights ---


def test_the_fingerprint_does_not_depend_on_sharding(tmp_path):
    prints = {models.fingerprint(write_model(tmp_path / str(n), shards=n)) for n in (1, 2, 3)}
    assert len(prints) == 1
    assert len(prints.pop()) == 32


def test_the_fingerprint_sees_every_tensor_its_name_type_and_shape(tmp_path):
    original = weights()
    variants = {"original": original}
    for name, tensor in original.items():
        variants[f"{name} trained"] = {**original, name: tensor + np.float32(0.01)}
        variants[f"{name} flat"] = {**original, name: tensor.reshape(-1)}
        variants[f"{name} typed"] = {**original, name: tensor.view(np.int32)}
        variants[f"{name} last value"] = {
            **original,
            name: np.where(np.arange(64) == 63, 1, tensor).astype(np.float32),
        }
    variants["swapped"] = {
        **original,
        "layer.0.weight": original["layer.1.weight"],
        "layer.1.weight": original["layer.0.weight"],
    }
    variants["renamed"] = {name.replace("layer.0", "layer.9"): tensor for name, tensor in original.items()}
    prints = {
        name: models.fingerprint(write_model(tmp_path / name, tensors)) for name, tensors in variants.items()
    }
    assert len(set(prints.values())) == len(variants)


def test_small_and_empty_tensors_have_fingerprints(tmp_path):
    tensors = {"one": np.ones(1, np.float32), "none": np.ones((0, 4), np.float32)}
    assert models.fingerprint(write_model(tmp_path, tensors))


# --- the built-in model ---


def test_smollm2_is_the_same_weights_everywhere():
    folder = models.resolve("smollm2-135m")
    assert models.fingerprint(folder) == "314646e79096aaa9261858223061821d"
    config = json.loads((folder / "config.json").read_bytes())
    shape = [
        config[key]
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    ]
    assert shape == [30, 576, 9, 3]
    assert config["vocab_size"] == 49152
    assert config["tie_word_embeddings"] is True
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size == models.BUILT_IN["smollm2-135m"].folder_bytes


def test_resolving_imports_neither_torch_nor_numpy(tmp_path):
    folder = write_model(tmp_path)
    code = (
        "import sys; from firsttoken import models; models.fingerprint(models.resolve(sys.argv[1]));"
        "print(*sys.modules.keys() & {'torch', 'numpy', 'transformers', 'huggingface_hub'})"
    )
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
