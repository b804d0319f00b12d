"""A Hugging Face folder of safetensors → a `Decoder`.

Files are read, not mapped: bytes go from the file into the fused weights, so that the peak is the model and one
tensor, and no mapped page stays behind in the process's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, cast

import torch

from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.checkpoint import TensorEntry, tensor_index, weight_files
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the dtypes that weights may be stored in."""


def load_model(
    folder: str | Path, dtype: torch.dtype, device: torch.device, *, max_positions: int | None = None
) -> Decoder:
    """Reads config and weights of `folder`, converts them to `dtype` and puts them on `device`.

    `max_positions`: the longest text that will be served, if less than the model's context length.
    Raises ConfigError, in one line that names the file and the tensor, if a tensor is missing, unexpected or
    misshapen, if a file is cut short, or if `ModelConfig` refuses the model.
    """
    folder = Path(folder)
    decoder = Decoder(ModelConfig.from_folder(folder), dtype, device, max_positions=max_positions)
    weights = decoder.named_weights()
    missing = dict.fromkeys(weights)
    for path in weight_files(folder):
        entries = tensor_index(path)
        with path.open("rb") as file:
            for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
                if name in missing:
                    _read(file, path, name, entry, weights[name])
                    del missing[name]
                elif name in weights:
                    raise ConfigError(f"{path}: tensor {name} is also in another file of {folder}")
                elif not _follows_from_others(name, decoder.config):
                    raise ConfigError(
                        f"{path}: unexpected tensor {name}; a {decoder.config.architecture} as config.json"
                        " describes it has none of that name"
                    )
    if missing:
        names = ", ".join(list(missing)[:3]) + (" …" if len(missing) > 3 else "")
        raise ConfigError(f"{folder}: {len(missing)} of {len(weights)} tensors are missing: {names}")
    decoder.prepare()
    return decoder


def _follows_from_others(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints hold although they are given by the config or by another tensor."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _read(file: BinaryIO, path: Path, name: str, entry: TensorEntry, weight: torch.Tensor) -> None:
    # q_norm and k_norm are one row in a checkpoint and a row per head in the decoder.
    repeated = name.endswith(("q_norm.weight", "k_norm.weight"))
    shape = tuple(weight.shape[1:] if repeated else weight.shape)
    if entry.shape != shape:
        raise ConfigError(
            f"{path}: tensor {name} is {list(entry.shape)}, by config.json it should be {list(shape)}"
        )
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ConfigError(
            f"{path}: tensor {name} is stored as {entry.dtype}; supported: {', '.join(DTYPES)}. Use the model's"
            " unquantised weights"
        )
    direct = dtype == weight.dtype and weight.device.type == "cpu" and not repeated
    target = weight if direct else torch.empty(shape, dtype=dtype)
    buffer = memoryview(cast(bytearray, target.view(-1).view(torch.uint8).numpy()))
    if entry.end - entry.start != len(buffer):
        raise ConfigError(f"{path}: tensor {name} has {entry.end - entry.start} bytes, not {len(buffer)}")
    file.seek(entry.start)
    if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
        raise ConfigError(f"{path} ended within tensor {name}: fetch the model again")
    if not direct:
        weight.copy_(target)
