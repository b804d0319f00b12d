"""Schema and transactions, on both databases."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from firsttoken.engine.config import ConfigError
from firsttoken.gateway import accounts
from firsttoken.gateway import store as store_module
from firsttoken.gateway import tables as t
from firsttoken.gateway.store import Store

RELEASED = ("0001",)
"""Revisions that a release had; upgrades from each are tested for ever."""


def test_the_migrations_make_the_model(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "target_metadata": t.metadata}
        )
        assert compare_metadata(context, t.metadata) == []


@pytest.mark.parametrize("revision", RELEASED)
def test_upgrades_from_every_release_keep_the_data(database: str, revision: str) -> None:
    old = Store(database)
    old.migrate(revision)
    with old.write() as connection:
        row = {
            "id": "k",
            "name": "kept",
            "digest": "d",
            "hint": "ft-",
            "role": "client",
            "tags": "[]",
            "created_at": 1.0,
        }
        names = ", ".join(row)
        connection.execute(
            sa.text(f"INSERT INTO keys ({names}) VALUES ({', '.join(':' + n for n in row)})"), row
        )
    old.migrate()
    old.migrate()
    with old.read() as connection:
        assert accounts.find_key(connection, "kept").id == "k"
    old.close()


def test_two_processes_that_migrate_at_once_both_succeed(database: str) -> None:
    stores = [Store(database) for _ in range(4)]
    errors: list[BaseException] = []

    def migrate(one: Store) -> None:
        try:
            one.migrate()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=migrate, args=(one,)) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for one in stores:
        one.close()


def test_writers_wait_for_each_other(store: Store) -> None:
    """Read, then write, from several threads: a deferred transaction would fail or lose updates."""

    def add() -> None:
        for _ in range(20):
            with store.write(store_module.LOCK_ADMIN) as connection:
                version = accounts.settings_version(connection)
                connection.execute(sa.delete(t.counters))
                connection.execute(sa.insert(t.counters), {"name": "settings_version", "value": version + 1})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.read() as connection:
        assert accounts.settings_version(connection) == 80


def test_other_databases_and_network_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="mysql"):
        Store("mysql://localhost/x")
    with pytest.raises(ConfigError, match="needs a file"):
        Store("sqlite://")
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    monkeypatch.setattr(store_module.sys, "platform", "linux")
    monkeypatch.setattr(Path, "read_text", lambda *_: mounts)
    with pytest.raises(ConfigError, match=r"network folder \(nfs4\)"):
        Store(f"sqlite:///{tmp_path / 'g.db'}")
    assert store_module.network_filesystem(tmp_path.parent) is None


def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    Store(f"sqlite:///{tmp_path / 'new' / 'g.db'}").close()
    assert (tmp_path / "new" / "g.db").stat().st_mode & 0o077 == 0


def test_keys_are_stored_as_digests_and_rotate(store: Store) -> None:
    key, secret = accounts.create_key(store, "admin", {"name": "a", "rpm": 5, "models": ["m"]})
    assert len(secret) >= 43
    with store.read() as connection:
        dump = repr(connection.execute(sa.select(t.keys)).all()) + repr(accounts.audit_log(connection))
    assert secret not in dump
    assert accounts.digest(secret) == key.digest
    rotated, other = accounts.rotate_key(store, "admin", "a")
    assert (rotated.id, rotated.rpm) == (key.id, 5)
    assert other != secret
    accounts.revoke_key(store, "admin", "a")
    with pytest.raises(ConfigError, match="revoked"):
        accounts.rotate_key(store, "admin", "a")
    accounts.create_key(store, "admin", {"name": "a"})  # the name is free again
    with store.read() as connection:
        actions = [line["action"] for line in reversed(accounts.audit_log(connection))]
    assert actions == ["key.create", "key.rotate", "key.revoke", "key.create"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a", "rpm": -1}, "rpm"),
        ({"name": "a", "tpm": 1.5}, "tpm"),
        ({"name": "a", "max_concurrency": True}, "max_concurrency"),
        ({"name": "a", "models": "m"}, "models"),
        ({"name": "a", "plan": "none"}, "none"),
        ({"name": "a", "burst": 1}, "burst"),
        ({"name": "a", "expires_at": "tomorrow"}, "expires_at"),
    ],
)
def test_a_wrong_key_is_refused_by_name(tmp_path: Path, values: dict[str, object], named: str) -> None:
    store = Store(f"sqlite:///{tmp_path / 'g.db'}")
    store.migrate()
    with pytest.raises(ConfigError, match=named):
        accounts.create_key(store, "admin", values)
    store.close()


def test_plans_give_limits_and_priority_and_the_last_admin_stays(store: Store) -> None:
    accounts.save_plan(store, "admin", {"name": "agents", "quota_week": 1000, "priority": "agent"})
    key, _ = accounts.create_key(store, "admin", {"name": "a", "plan": "agents", "rpm": 3})
    assert key.limits == (("quota_week", 1000), ("rpm", 3))
    assert key.priority == accounts.PRIORITIES["agent"]
    accounts.save_plan(store, "admin", {"quota_week": None, "priority": "load-test"}, "agents")
    with store.read() as connection:
        key = accounts.find_key(connection, "a")
    assert key.limits == (("rpm", 3),)
    assert key.load_test
    with pytest.raises(ConfigError, match="used by a"):
        accounts.delete_plan(store, "admin", "agents")
    assert accounts.ensure_admin_key(store) is not None
    assert accounts.ensure_admin_key(store) is None
    with pytest.raises(ConfigError, match="last admin"):
        accounts.revoke_key(store, "admin", "admin")
