"""Keys, plans, prices and aliases in the store, and the audit log of every change to them.

A key is 256 random bits, shown once when it is made; the store holds its SHA-256. Each change bumps
`settings_version`, by which every gateway process notices it within `auth.REFRESH_S`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa

from firsttoken.engine.config import ConfigError
from firsttoken.gateway import tables as t
from firsttoken.gateway.store import LOCK_ADMIN, Store

PRIORITIES = {"interactive": 0, "agent": 10, "load-test": 20}
"""Priority class of a plan → the `priority` of its requests at the engine (lower is served first)."""

LOAD_TEST = "load-test"
"""Tag of keys whose traffic stays out of live charts and alerts."""

QUOTAS = ("quota_5h", "quota_week", "quota_month")
RATES = ("rpm", "tpm", "concurrency")
NAME = re.compile(r"[\w][\w .:@/+-]{0,99}", re.UNICODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    id: str
    name: str
    models: frozenset[str] | None = None
    """None: every model."""
    quota_5h: int | None = None
    quota_week: int | None = None
    quota_month: int | None = None
    priority: str = "interactive"
    upstream: str | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as the gateway uses it; the secret itself is nowhere in it."""

    id: str
    name: str
    digest: str
    hint: str
    role: Literal["client", "admin"]
    plan: Plan | None = None
    models: frozenset[str] | None = None
    tags: frozenset[str] = frozenset()
    rpm: int | None = None
    tpm: int | None = None
    max_concurrency: int | None = None
    expires_at: float | None = None
    created_at: float = 0.0
    revoked_at: float | None = None
    limits: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """(kind, capacity) of each limit that is set, in the order in which their rows are locked."""
    priority: int = 0
    load_test: bool = False

    def allows(self, model: str) -> bool:
        """Whether the key and its plan both include `model` (a name as clients write it)."""
        if self.models is not None and model not in self.models:
            return False
        return self.plan is None or self.plan.models is None or model in self.plan.models


class NotFound(ConfigError):
    """There is no such key, plan, price or alias."""


# ---------------------------------------------------------------- reading


def load_keys(connection: sa.Connection) -> list[Key]:
    """Every key that is not revoked."""
    plans = {plan.id: plan for plan in load_plans(connection)}
    rows = connection.execute(sa.select(t.keys).where(t.keys.c.revoked_at.is_(None))).mappings()
    return [_key(row, plans) for row in rows]


def find_key(connection: sa.Connection, name: str) -> Key:
    """The live key of that name or id, else the newest revoked one."""
    plans = {plan.id: plan for plan in load_plans(connection)}
    query = (
        sa.select(t.keys)
        .where(sa.or_(t.keys.c.name == name, t.keys.c.id == name))
        .order_by(t.keys.c.revoked_at.is_(None).desc(), t.keys.c.created_at.desc())
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"there is no key {name!r}")
    return _key(row, plans)


def list_keys(connection: sa.Connection, revoked: bool = False) -> list[Key]:
    plans = {plan.id: plan for plan in load_plans(connection)}
    query = sa.select(t.keys).order_by(t.keys.c.created_at)
    if not revoked:
        query = query.where(t.keys.c.revoked_at.is_(None))
    return [_key(row, plans) for row in connection.execute(query).mappings()]


def load_plans(connection: sa.Connection) -> list[Plan]:
    rows = connection.execute(sa.select(t.plans).order_by(t.plans.c.name)).mappings()
    return [Plan(**{**row, "models": _names(row["models"])}) for row in rows]


def find_plan(connection: sa.Connection, name: str) -> Plan:
    for plan in load_plans(connection):
        if name in (plan.name, plan.id):
            return plan
    raise NotFound(f"there is no plan {name!r}")


def load_aliases(connection: sa.Connection) -> dict[str, str]:
    return {row.name: row.target for row in connection.execute(sa.select(t.aliases))}


def load_prices(connection: sa.Connection) -> dict[str, dict[str, float]]:
    rows = connection.execute(sa.select(t.prices)).mappings()
    return {row["model"]: {k: row[k] for k in ("prompt", "cached", "completion")} for row in rows}


def settings_version(connection: sa.Connection) -> int:
    query = sa.select(t.counters.c.value).where(t.counters.c.name == "settings_version")
    return connection.execute(query).scalar() or 0


def _key(row: sa.RowMapping, plans: Mapping[str, Plan]) -> Key:
    plan = plans.get(row["plan_id"])
    tags = frozenset(row["tags"])
    limits = {"rpm": row["rpm"], "tpm": row["tpm"], "concurrency": row["max_concurrency"]}
    limits |= {quota: getattr(plan, quota) for quota in QUOTAS if plan}
    load_test = LOAD_TEST in tags or (plan is not None and plan.priority == LOAD_TEST)
    priority = PRIORITIES[LOAD_TEST] if load_test else PRIORITIES[plan.priority] if plan else 0
    return Key(
        **{
            name: row[name]
            for name in ("id", "name", "digest", "hint", "role", "rpm", "tpm", "max_concurrency")
        },
        **{name: row[name] for name in ("expires_at", "created_at", "revoked_at")},
        plan=plan,
        models=_names(row["models"]),
        tags=tags,
        limits=tuple(sorted((kind, value) for kind, value in limits.items() if value is not None)),
        priority=priority,
        load_test=load_test,
    )


def _names(models: list[str] | None) -> frozenset[str] | None:
    return None if models is None else frozenset(models)


# ---------------------------------------------------------------- keys


def new_secret() -> str:
    return f"ft-{secrets.token_urlsafe(32)}"


def digest(secret: str) -> str:
    """What the store keeps of a key. Plain SHA-256 suffices: 256 random bits can't be guessed or tabulated."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def create_key(store: Store, actor: str, values: Mapping[str, Any], role: str = "client") -> tuple[Key, str]:
    """Makes a key; the second value is the secret, which exists nowhere else. See `_checked_key` for
    `values`.
    """
    secret = new_secret()
    with store.write(LOCK_ADMIN) as connection:
        row = _checked_key(connection, values, creating=True)
        row |= {
            "id": f"key_{secrets.token_hex(8)}",
            "digest": digest(secret),
            "hint": secret[:7],
            "role": role,
            "created_at": time.time(),
        }
        connection.execute(sa.insert(t.keys), row)
        _changed(store, connection, actor, "key.create", row["name"], dict(values) | {"role": role})
        return find_key(connection, row["id"]), secret


def update_key(store: Store, actor: str, name: str, values: Mapping[str, Any]) -> Key:
    with store.write(LOCK_ADMIN) as connection:
        key = _live_key(connection, name)
        row = _checked_key(connection, values, creating=False, id=key.id)
        if row:
            connection.execute(sa.update(t.keys).where(t.keys.c.id == key.id).values(row))
            _changed(store, connection, actor, "key.update", key.name, dict(values))
        return find_key(connection, key.id)


def rotate_key(store: Store, actor: str, name: str) -> tuple[Key, str]:
    """A new secret for the same key: its limits, plan and usage stay; the old secret ends at once."""
    secret = new_secret()
    with store.write(LOCK_ADMIN) as connection:
        key = _live_key(connection, name)
        row = {"digest": digest(secret), "hint": secret[:7]}
        connection.execute(sa.update(t.keys).where(t.keys.c.id == key.id).values(row))
        _changed(store, connection, actor, "key.rotate", key.name, {})
        return find_key(connection, key.id), secret


def revoke_key(store: Store, actor: str, name: str) -> Key:
    """Ends a key for good. Streams that run already go on."""
    with store.write(LOCK_ADMIN) as connection:
        key = _live_key(connection, name)
        admins = [other for other in load_keys(connection) if other.role == "admin"]
        if key.role == "admin" and len(admins) == 1:
            raise ConfigError(f"{key.name!r} is the last admin key: create another one before revoking it")
        connection.execute(sa.update(t.keys).where(t.keys.c.id == key.id).values(revoked_at=time.time()))
        _changed(store, connection, actor, "key.revoke", key.name, {})
        return find_key(connection, key.id)


def ensure_admin_key(store: Store) -> str | None:
    """The secret of a first admin key if there was none yet."""
    with store.read() as connection:
        if any(key.role == "admin" for key in load_keys(connection)):
            return None
    return create_key(store, "gateway", {"name": "admin"}, role="admin")[1]


def _live_key(connection: sa.Connection, name: str) -> Key:
    key = find_key(connection, name)
    if key.revoked_at is not None:
        raise ConfigError(f"the key {name!r} is revoked")
    return key


def _checked_key(
    connection: sa.Connection, values: Mapping[str, Any], creating: bool, id: str | None = None
) -> dict[str, Any]:
    """Column values from name, plan, models, tags, rpm, tpm, max_concurrency, expires_at; ConfigError if
    wrong.
    """
    _known(values, ("name", "plan", "models", "tags", "rpm", "tpm", "max_concurrency", "expires_at"))
    row: dict[str, Any] = {"tags": []} if creating else {}
    if creating or "name" in values:
        row["name"] = _name(values.get("name"))
        taken = sa.select(t.keys.c.id).where(t.keys.c.name == row["name"], t.keys.c.revoked_at.is_(None))
        if connection.execute(taken).scalar() not in (None, id):
            raise ConfigError(f"there is a key {row['name']!r} already: choose another name, or rotate it")
    if "plan" in values:
        row["plan_id"] = None if values["plan"] is None else find_plan(connection, values["plan"]).id
    for limit in ("rpm", "tpm", "max_concurrency"):
        if limit in values:
            row[limit] = _count(limit, values[limit])
    for name in ("models", "tags"):
        if name in values and (values[name] is not None or name == "models"):
            row[name] = _list(name, values[name])
    if "expires_at" in values:
        expires = values["expires_at"]
        if expires is not None and (not isinstance(expires, int | float) or isinstance(expires, bool)):
            raise ConfigError("expires_at: give seconds since the epoch, or null")
        row["expires_at"] = expires
    return row


# ---------------------------------------------------------------- plans, prices, aliases


def save_plan(store: Store, actor: str, values: Mapping[str, Any], name: str | None = None) -> Plan:
    """Creates a plan, or changes the one called `name`."""
    _known(values, ("name", "models", *QUOTAS, "priority", "upstream"))
    with store.write(LOCK_ADMIN) as connection:
        row: dict[str, Any] = {}
        if name is None or "name" in values:
            row["name"] = _name(values.get("name"))
            if row["name"] != name and any(plan.name == row["name"] for plan in load_plans(connection)):
                raise ConfigError(f"there is a plan {row['name']!r} already")
        for quota in QUOTAS:
            if quota in values:
                row[quota] = _count(quota, values[quota])
        if "models" in values:
            row["models"] = _list("models", values["models"])
        if "upstream" in values:
            row["upstream"] = values["upstream"]
        priority = values.get("priority", "interactive" if name is None else None)
        if priority is not None:
            if priority not in PRIORITIES:
                raise ConfigError(f"priority: {priority!r} is none of {', '.join(PRIORITIES)}")
            row["priority"] = priority
        if name is None:
            row |= {"id": f"plan_{secrets.token_hex(8)}", "created_at": time.time()}
            connection.execute(sa.insert(t.plans), row)
            id = row["id"]
        else:
            id = find_plan(connection, name).id
            if row:
                connection.execute(sa.update(t.plans).where(t.plans.c.id == id).values(row))
        action = "plan.create" if name is None else "plan.update"
        _changed(store, connection, actor, action, name or row["name"], dict(values))
        return find_plan(connection, id)


def delete_plan(store: Store, actor: str, name: str) -> None:
    with store.write(LOCK_ADMIN) as connection:
        plan = find_plan(connection, name)
        users = [key.name for key in load_keys(connection) if key.plan and key.plan.id == plan.id]
        if users:
            raise ConfigError(
                f"the plan {name!r} is used by {', '.join(sorted(users)[:5])}: give them another first"
            )
        connection.execute(sa.update(t.keys).where(t.keys.c.plan_id == plan.id).values(plan_id=None))
        connection.execute(sa.delete(t.plans).where(t.plans.c.id == plan.id))
        _changed(store, connection, actor, "plan.delete", plan.name, {})


def set_price(store: Store, actor: str, model: str, price: Mapping[str, float] | None) -> None:
    """Price per million tokens of new requests (`prompt`, `cached`, `completion`); None removes it."""
    with store.write(LOCK_ADMIN) as connection:
        connection.execute(sa.delete(t.prices).where(t.prices.c.model == model))
        if price is not None:
            _known(price, ("prompt", "cached", "completion"))
            for name, value in price.items():
                if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e9:
                    raise ConfigError(f"price: {name} must be a number of currency units per million tokens")
            if "prompt" not in price or "completion" not in price:
                raise ConfigError("price: prompt and completion are needed (cached defaults to prompt)")
            row = {"cached": price["prompt"], **price, "model": model}
            connection.execute(sa.insert(t.prices), row)
        _changed(store, connection, actor, "price.set", model, dict(price or {}))


def set_alias(store: Store, actor: str, name: str, target: str | None) -> None:
    """Points the name `name` to the model `target`; None returns it to the configuration file's."""
    with store.write(LOCK_ADMIN) as connection:
        connection.execute(sa.delete(t.aliases).where(t.aliases.c.name == name))
        if target is not None:
            connection.execute(sa.insert(t.aliases), {"name": _name(name), "target": _name(target)})
        _changed(store, connection, actor, "alias.set", name, {"target": target})


def audit_log(connection: sa.Connection, limit: int = 200) -> list[dict[str, Any]]:
    """Admin acts, newest first."""
    rows = connection.execute(sa.select(t.audit).order_by(t.audit.c.id.desc()).limit(limit)).mappings()
    return [dict(row) for row in rows]


def _changed(
    store: Store, connection: sa.Connection, actor: str, action: str, target: str, detail: Mapping[str, Any]
) -> None:
    row = {"at": time.time(), "actor": actor, "action": action, "target": target, "detail": dict(detail)}
    connection.execute(sa.insert(t.audit), row)
    store.add_up(connection, t.counters, ["value"], [{"name": "settings_version", "value": 1}])


# ---------------------------------------------------------------- checks


def _known(values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in values:
        if name not in names:
            raise ConfigError(f"{name!r} is not known here; known: {', '.join(names)}")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ConfigError(f"name: {value!r} must be 1 to 100 letters, digits, spaces or .:@/+-_")
    return value


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ConfigError(f"{name}: {value!r} must be a whole number, 0 or more, or null for no limit")
    return value


def _list(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name}: must be a list of names")
    return sorted(set(value))
