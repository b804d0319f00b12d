"""The database: SQLite (WAL) by default, PostgreSQL by address. Synchronous; never called on the event loop.

Every write is one transaction that holds the write lock from its first statement: BEGIN IMMEDIATE on SQLite
(a deferred BEGIN that reads and then writes fails at once when another process wrote in between), row or
advisory locks on PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from firsttoken.engine.config import ConfigError

BUSY_TIMEOUT_S = 15.0
"""How long a writer waits for another's transaction on SQLite. Measured waits are tens of milliseconds."""

NETWORK_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "afp",
    "9p",
    "fuse.sshfs",
    "lustre",
    "ceph",
    "gluster",
    "afs",
    "webdav",
)

LOCK_MIGRATE, LOCK_LEDGER, LOCK_ADMIN = 0x66740001, 0x66740002, 0x66740003
"""PostgreSQL advisory locks: one migrator, one ledger writer, one admin act at a time."""


class Store:
    """An engine and its two kinds of transaction."""

    def __init__(self, url: str):
        self.url = sa.make_url(url)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        if self.sqlite:
            self.engine = _sqlite_engine(self.url)
        elif self.url.get_backend_name() == "postgresql":
            self.engine = sa.create_engine(
                self.url.set(drivername="postgresql+psycopg"), pool_size=8, max_overflow=8, pool_pre_ping=True
            )
        else:
            raise ConfigError(
                f"database: {self.url.get_backend_name()} is not supported; use sqlite:///FILE or postgresql://…"
            )

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A consistent snapshot; never waits for writers on SQLite (WAL) or PostgreSQL."""
        with self.engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self, lock: int | None = None) -> Iterator[sa.Connection]:
        """One atomic write. `lock` names an advisory lock to hold on PostgreSQL; SQLite has one writer
        anyway.
        """
        with self.engine.connect() as connection:
            connection = connection.execution_options(firsttoken_write=True)
            with connection.begin():
                if lock is not None and not self.sqlite:
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": lock})
                yield connection

    def now(self, connection: sa.Connection) -> float:
        """The clock that leases go by: the database's own, for its clients may sit on several hosts."""
        if self.sqlite:
            return time.time()
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())

    def insert(self, table: sa.Table) -> Any:
        """INSERT with `on_conflict_do_update` and `on_conflict_do_nothing`, in the database's dialect."""
        return sqlite.insert(table) if self.sqlite else postgresql.insert(table)

    def insert_rows(self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        """Inserts many rows in one statement, with the rows as one JSON parameter.

        `executemany` would let go of the interpreter's lock and ask for it back once per row, and each time make the
        event loop's thread wait: 2,000 rows a second cost two thirds of the relay's throughput.
        """
        names = [column.name for column in table.columns]
        if self.sqlite:
            values = ", ".join(f"json_extract(value, '$.{name}')" for name in names)
            source = f"SELECT {values} FROM json_each(:rows)"
        else:
            source = f"SELECT {', '.join(names)} FROM json_populate_recordset(NULL::{table.name}, :rows)"
        statement = sa.text(f"INSERT INTO {table.name} ({', '.join(names)}) {source}")
        connection.execute(statement, {"rows": msgspec.json.encode(rows).decode()})

    def among(self, column: sa.Column[Any], values: list[str]) -> sa.ColumnElement[bool]:
        """`column IN values` with one JSON parameter, however many values there are."""
        parameter = sa.literal(msgspec.json.encode(values).decode(), sa.Text)
        if self.sqlite:
            return column.in_(sa.select(sa.func.json_each(parameter).table_valued("value").c.value))
        return column.in_(
            sa.select(sa.func.json_array_elements_text(sa.cast(parameter, sa.JSON)).column_valued())
        )

    def add_up(
        self, connection: sa.Connection, table: sa.Table, sums: Sequence[str], rows: list[dict[str, Any]]
    ) -> None:
        """Upserts rows, adding the columns `sums` to what is there."""
        if rows:
            insert = self.insert(table)
            keys = [column.name for column in table.primary_key.columns]
            added = {name: table.c[name] + insert.excluded[name] for name in sums}
            connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=added), rows)

    def close(self) -> None:
        self.engine.dispose()

    # ---------------------------------------------------------------- schema

    def migrate(self, revision: str = "head") -> None:
        """Brings the schema up to date. Waits while another process does; leaves it alone if it is newer."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
        with self._migrator(), self.engine.connect() as connection:
            # Migrations run inside one transaction on both databases: all or nothing.
            connection = connection.execution_options(firsttoken_write=True)
            with connection.begin():
                config.attributes["connection"] = connection
                command.upgrade(config, revision)

    @contextlib.contextmanager
    def _migrator(self) -> Iterator[None]:
        if not self.sqlite:
            with self.engine.connect() as connection:
                connection.execute(sa.text("SELECT pg_advisory_lock(:lock)"), {"lock": LOCK_MIGRATE})
                try:
                    yield
                finally:
                    connection.execute(sa.text("SELECT pg_advisory_unlock(:lock)"), {"lock": LOCK_MIGRATE})
            return
        import fcntl

        with open(f"{self.url.database}.migrating", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if not url.database or url.database == ":memory:":
        raise ConfigError("database: SQLite needs a file, as sqlite:////var/lib/firsttoken/gateway.db")
    path = Path(url.database).expanduser().absolute()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if kind := network_filesystem(path.parent):
        raise ConfigError(
            f"database: {path} is on a network folder ({kind}), where SQLite's locks and shared memory are not"
            " reliable; use a local folder, or PostgreSQL"
        )
    if not path.exists():
        path.touch(mode=0o600)
    engine = sa.create_engine(
        url.set(drivername="sqlite+pysqlite", database=str(path)),
        connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None, "check_same_thread": False},
        pool_size=8,
        max_overflow=8,
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        write = connection.get_execution_options().get("firsttoken_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def network_filesystem(folder: Path) -> str | None:
    """The type of the file system that holds `folder` if it is a network one (Linux, macOS), else None."""
    kind = _filesystem_type(os.path.realpath(folder))
    return kind if kind.startswith(NETWORK_FILESYSTEMS) else None


def _filesystem_type(folder: str) -> str:
    mounts: list[tuple[str, str]] = []  # (mount point, type)
    if sys.platform == "linux":
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split(" ")
            mounts.append((point.encode().decode("unicode_escape"), kind))
    elif sys.platform == "darwin":
        for line in subprocess.run(
            ["/sbin/mount"], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            point, _, options = line.partition(" on ")[2].rpartition(" (")
            mounts.append((point, options.split(",")[0].rstrip(")")))
    inside = [
        (len(point), kind) for point, kind in mounts if (folder + "/").startswith(point.rstrip("/") + "/")
    ]
    # Of two mounts on one point the later hides the earlier; max() would keep the first of equals.
    return max(reversed(inside), key=lambda mount: mount[0], default=(0, ""))[1]
