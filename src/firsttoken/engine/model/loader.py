"""A Hugging Face folder of safetensors → a `Decoder`.

Files are read, not mapped: bytes go from the file into the fused weights, so the peak is the model plus one tensor,
and no mapped page stays behind in the process's memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class StoredTensor:
    """An entry of a safetensors header."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    """Bytes from the start of the file."""
    end: int


def load_model(
    folder: str | Path, dtype: torch.dtype, device: torch.device, *, max_positions: int | None = None
) -> Decoder:
    """Reads config and weights of `folder`, converts them to `dtype` and puts them on `device`.

    Raises ConfigError, in one line that names file and tensor, if a tensor is missing, unexpected or misshapen, if a
    file is truncated or no safetensors file, or if `ModelConfig` refuses the model.
    """
    folder = Path(folder)
    decoder = Decoder(ModelConfig.from_folder(folder), dtype, device, max_positions=max_positions)
    expected = decoder.named_weights()
    missing = set(expected)
    for path in _weight_files(folder):
        with path.open("rb") as file:
            for stored in _read_header(file, path):
                weight = expected.get(stored.name)
                if weight is None:
                    if _is_redundant(stored.name, decoder.config):
                        continue
                    raise ConfigError(
                        f"{path}: unexpected tensor {stored.name}, which a {decoder.config.architecture} of this"
                        " config.json has no place for"
                    )
                if stored.name not in missing:
                    raise ConfigError(f"{path}: tensor {stored.name} is already in another file of {folder}")
                _read_into(weight, stored, file, path)
                missing.remove(stored.name)
    if missing:
        first = min(missing)
        raise ConfigError(f"{folder}: tensor {first} is missing ({len(missing)} missing in all)")
    return decoder


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} cannot be read: {error!r}") from None
        for name in names:
            if not (folder / name).is_file():
                raise ConfigError(f"{folder}: {name} is missing, which {index.name} names")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def _read_header(file: BinaryIO, path: Path) -> Iterator[StoredTensor]:
    """The file's tensors in order of position. Format: https://huggingface.co/docs/safetensors (8 bytes little-endian
    length, that much JSON, then the data that its offsets count from)."""
    size = path.stat().st_size
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
    if 8 + length > size:
        raise ConfigError(
            f"{path} is truncated or no safetensors file: its header does not fit in {size} bytes"
        )
    try:
        header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = [
            StoredTensor(name, t["dtype"], t["shape"], *(8 + length + offset for offset in t["data_offsets"]))
            for name, t in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from None
    for stored in tensors:
        if stored.end > size:
            raise ConfigError(
                f"{path} is truncated: tensor {stored.name} ends at byte {stored.end} of {size}; fetch the file again"
            )
    yield from sorted(tensors, key=lambda stored: stored.start)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _read_into(weight: torch.Tensor, stored: StoredTensor, file: BinaryIO, path: Path) -> None:
    # q_norm and k_norm are one row in the file and one row per head here.
    per_head = stored.name.endswith(("q_norm.weight", "k_norm.weight"))
    shape = list(weight.shape[1:] if per_head else weight.shape)
    if stored.shape != shape:
        raise ConfigError(f"{path}: tensor {stored.name} has shape {stored.shape}, config.json needs {shape}")
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise ConfigError(
            f"{path}: tensor {stored.name} is stored as {stored.dtype}; supported: {', '.join(DTYPES)}"
        )
    direct = dtype == weight.dtype and weight.device.type == "cpu" and not per_head
    target = weight if direct else torch.empty(shape, dtype=dtype)
    buffer = memoryview(target.view(-1).view(torch.uint8).numpy())
    if stored.end - stored.start != len(buffer):
        raise ConfigError(
            f"{path}: tensor {stored.name} spans {stored.end - stored.start} bytes, its shape needs {len(buffer)}"
        )
    file.seek(stored.start)
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise ConfigError(f"{path} ended inside tensor {stored.name}; fetch the file again")
    if not direct:
        weight.copy_(target)
