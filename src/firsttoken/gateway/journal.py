"""A process's own record of its requests, written before each is forwarded and when it ends.

Every record is one `write` system call to a file opened for appending, so it survives the death of the process
(kill -9 included), for the kernel already has it. It does not survive a power failure: nothing is fsynced, on
purpose, as an fsync would cost every request milliseconds.

A lock on the process's `.lock` file is held for its whole life and dropped by the kernel at its end: whoever gets
it knows that the process is dead and that its files are theirs to read and delete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROTATE_BYTES = 32 << 20


class Record(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request, as it starts (status "running") or ended. Fields are the columns of `tables.requests`."""

    id: str
    process_id: str
    key_id: str
    endpoint: str
    alias: str
    model: str
    started_at: float
    upstream: str = ""
    status: str = "running"
    client_id: str | None = None
    load_test: bool = False
    attempts: int = 0
    stream: bool = False
    http_status: int | None = None
    error: str | None = None
    gateway_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    first_decode_ms: float | None = None
    ttft_ms: float | None = None
    duration_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    windows: dict[str, float] = {}
    """Quota kind → the window that the tokens count in."""

    @property
    def tokens(self) -> int:
        """What counts against token limits."""
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class Journal:
    """The journal of this process: PROCESS.lock and PROCESS.N.jsonl in `folder`."""

    def __init__(self, folder: Path, process_id: str):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.process_id = folder, process_id
        # Locked first and named afterwards, so that nobody ever sees the lock of a live process free.
        unnamed = folder / f"{process_id}.new"
        self.lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        unnamed.rename(folder / f"{process_id}.lock")
        self.number = 0
        self.old: list[Path] = []
        self._open()

    def _open(self) -> None:
        self.path = self.folder / f"{self.process_id}.{self.number}.jsonl"
        self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.size = 0

    def append(self, record: Record) -> None:
        """One unbuffered write. Raises OSError when the disk is full: the request must then not be
        forwarded.
        """
        line = _encoder.encode(record) + b"\n"
        self.size += len(line)
        written = os.write(self.fd, line)
        if written != len(line):
            os.write(self.fd, b"\n")
            raise OSError("the journal's disk is full")

    def rotate(self) -> None:
        """Starts a new file; the caller deletes the old ones (`forget_old`) once their records are stored."""
        os.close(self.fd)
        self.old.append(self.path)
        self.number += 1
        self._open()

    def forget_old(self, files: list[Path]) -> None:
        for path in files:
            path.unlink(missing_ok=True)
            self.old.remove(path)

    def replay(self) -> Iterator[Record]:
        """All records of this process that are still on disk."""
        for path in [*self.old, self.path]:
            yield from read(path)

    def close(self, delete: bool) -> None:
        os.close(self.fd)
        if delete:
            for path in [*self.old, self.path, self.folder / f"{self.process_id}.lock"]:
                path.unlink(missing_ok=True)
        os.close(self.lock)


def read(path: Path) -> Iterator[Record]:
    """The records of a journal file. A torn last line, of a process killed while it wrote, is left out."""
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with contextlib.suppress(msgspec.DecodeError):
                    yield _decoder.decode(line)


@contextlib.contextmanager
def orphan(folder: Path, process_id: str) -> Iterator[list[Path] | None]:
    """The files of a process of this host if it is dead (deleted afterwards), else None."""
    lock = _free_lock(folder / f"{process_id}.lock")
    if lock is None:
        yield None
        return
    files = sorted(folder.glob(f"{process_id}.*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    try:
        yield files
        for path in [*files, folder / f"{process_id}.lock"]:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def processes(folder: Path) -> list[str]:
    """Ids of the processes, alive or dead, that have a journal in `folder`."""
    return [path.stem for path in folder.glob("*.lock")]


def _free_lock(path: Path) -> int | None:
    """A file descriptor that holds the lock, or None if a live process holds it or the file is gone."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
