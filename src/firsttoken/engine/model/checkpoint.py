"""The files of a checkpoint and where its tensors lie in them. No torch: the HTTP processes check models too."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.engine.config import ConfigError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {name}: it is not a Hugging Face model folder") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder / name} can't be read ({error}): fetch the model again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / name} is not a JSON object: fetch the model again")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index, else model.safetensors, else all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(folder, index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map: fetch the model again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, {missing[0]} first: fetch again"
            )
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    files = [
        file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("consolidated")
    ]
    if not files:
        others = sorted(
            {file.suffix for file in folder.iterdir() if file.suffix in (".bin", ".pth", ".pt", ".gguf")}
        )
        instead = f" (only {', '.join(others)} files: convert them)" if others else ""
        raise ConfigError(f"{folder} has no safetensors weights{instead}")
    return files


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `dtype` in safetensors' spelling, `start` and `end` as offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_index(file: Path) -> dict[str, TensorEntry]:
    """The header of a safetensors file. Raises ConfigError if the file is damaged or cut short."""
    damaged = f"{file} is not a whole safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(length)) if length <= size else None
        if not isinstance(header, dict):
            raise ValueError("no header")
        header.pop("__metadata__", None)
        base = 8 + length
        entries = {
            name: TensorEntry(
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=base + entry["data_offsets"][0],
                end=base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise ConfigError(f"{damaged} ({error}): fetch the model again") from None
    end = max((entry.end for entry in entries.values()), default=base)
    if end > size:
        raise ConfigError(f"{damaged} ({size:,} bytes of {end:,}): fetch the model again")
    return entries
