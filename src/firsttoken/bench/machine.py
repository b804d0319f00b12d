"""What a figure was measured on: machine, versions, command, date."""

from __future__ import annotations

import importlib
import platform
import shlex
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from firsttoken import __version__
from firsttoken.backends.process import available_cores


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def nvml() -> Any | None:
    """NVIDIA's management library, initialised; None without the driver or without nvidia-ml-py."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception:  # no package, no driver, no permission: all mean "no GPU that we can read"
        return None
    return library


def gpus() -> list[str]:
    library = nvml()
    if library is None:
        return []
    count = library.nvmlDeviceGetCount()
    return [str(library.nvmlDeviceGetName(library.nvmlDeviceGetHandleByIndex(i))) for i in range(count)]


class GpuMeter:
    """Mean utilisation of GPU 0 in percent while the context is open; `percent` stays None without NVML."""

    def __init__(self, every: float = 0.05) -> None:
        self.percent: float | None = None
        self._library, self._every, self._stop = nvml(), every, threading.Event()

    def __enter__(self) -> GpuMeter:
        if self._library is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._library is not None:
            self._stop.set()
            self._thread.join()

    def _sample(self) -> None:
        assert self._library is not None
        handle, readings = self._library.nvmlDeviceGetHandleByIndex(0), []
        while not self._stop.wait(self._every):
            readings.append(self._library.nvmlDeviceGetUtilizationRates(handle).gpu)
            self.percent = sum(readings) / len(readings)


def describe() -> dict[str, Any]:
    """Machine and software, without anything that names a person or a host."""
    versions = {"firsttoken": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "uvicorn", "vllm"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "processor": processor(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def command() -> str:
    """The command line that runs now, with the key of a server left out."""
    words, hidden = ["firsttoken", *sys.argv[1:]], False
    shown = []
    for word in words:
        shown.append("…" if hidden else word.split("=")[0] + "=…" if word.startswith("--api-key=") else word)
        hidden = word == "--api-key"
    return shlex.join(shown)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
