"""The admin API, `/admin/v1/…`: JSON in and out, for the command line and the console. See docs/gateway-admin-api.md.

Every route needs an admin key and runs in a thread; each change is one transaction with its line in the audit log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec
import sqlalchemy as sa

from firsttoken.engine.config import ConfigError
from firsttoken.gateway import accounts, histogram, reports
from firsttoken.gateway.accounts import Key, Plan
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.store import Store

Query = Mapping[str, str]


class Text(str):
    """An answer that is CSV, not JSON."""


class Admin:
    """`handle` is called in a thread; `live` gives what only the serving process knows (see `App.live`)."""

    def __init__(self, store: Store, live: Callable[[], dict[str, Any]]):
        self.store, self.live = store, live

    def handle(self, method: str, path: str, query_string: bytes, body: bytes, actor: Key) -> tuple[int, Any]:
        """(status, answer). `path` begins after /admin/v1/. Raises ApiError."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        query = {name: values[-1] for name, values in parse_qs(query_string.decode("latin-1")).items()}
        resource, names = parts[0], parts[1:]
        route = getattr(self, f"_{method.lower()}_{resource}", None) if resource.isidentifier() else None
        if route is None:
            raise ApiError(404, f"There is no {method} /admin/v1/{resource}.", "not_found")
        try:
            answer = route(names, query, body, actor.name)
        except accounts.NotFound as error:
            raise ApiError(404, str(error), "not_found") from None
        except ConfigError as error:
            raise ApiError(400, str(error), "invalid_value") from None
        return (201 if method == "POST" and len(names) == 0 else 200), answer

    # ---------------------------------------------------------------- keys

    def _get_keys(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        with self.store.read() as connection:
            if names:
                key = accounts.find_key(connection, names[0])
                return show_key(key) | {"quota_use": reports.quotas(connection, key.id)}
            revoked = _flag(query, "revoked")
            return {"data": [show_key(key) for key in accounts.list_keys(connection, revoked)]}

    def _post_keys(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        if len(names) == 2 and names[1] == "rotate":
            key, secret = accounts.rotate_key(self.store, actor, names[0])
        elif len(names) == 2 and names[1] == "revoke":
            return show_key(accounts.revoke_key(self.store, actor, names[0]))
        elif not names:
            values = _object(body)
            role = values.pop("role", "client")
            if role not in ("client", "admin"):
                raise ConfigError("role: client or admin")
            key, secret = accounts.create_key(self.store, actor, values, role)
        else:
            raise ApiError(404, "Known: keys, keys/NAME/rotate, keys/NAME/revoke.", "not_found")
        return show_key(key) | {"secret": secret}

    def _patch_keys(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        return show_key(accounts.update_key(self.store, actor, _one(names), _object(body)))

    def _delete_keys(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        return show_key(accounts.revoke_key(self.store, actor, _one(names)))

    def _get_me(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        """The admin key that asks: by this the console checks a sign-in."""
        with self.store.read() as connection:
            return show_key(accounts.find_key(connection, actor))

    # ---------------------------------------------------------------- plans

    def _get_plans(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        with self.store.read() as connection:
            if names:
                return show_plan(accounts.find_plan(connection, names[0]))
            return {"data": [show_plan(plan) for plan in accounts.load_plans(connection)]}

    def _post_plans(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        if names:
            raise ApiError(404, "POST /admin/v1/plans makes a plan; PATCH changes one.", "not_found")
        return show_plan(accounts.save_plan(self.store, actor, _object(body)))

    def _patch_plans(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        return show_plan(accounts.save_plan(self.store, actor, _object(body), _one(names)))

    def _delete_plans(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        accounts.delete_plan(self.store, actor, _one(names))
        return {"deleted": names[0]}

    # ---------------------------------------------------------------- models

    def _get_models(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        with self.store.read() as connection:
            return self.live() | {"prices": accounts.load_prices(connection)}

    def _put_models(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        """models/prices/MODEL and models/aliases/NAME; model names may contain slashes."""
        kind, name = _kind_and_name(names)
        values = _object(body)
        if kind == "prices":
            accounts.set_price(self.store, actor, name, values)
            return {"model": name, **values}
        if not isinstance(values.get("target"), str):
            raise ConfigError('target: name a model, as {"target": "MODEL"}')
        accounts.set_alias(self.store, actor, name, values["target"])
        return {"alias": name, "target": values["target"]}

    def _delete_models(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        kind, name = _kind_and_name(names)
        if kind == "prices":
            accounts.set_price(self.store, actor, name, None)
        else:
            accounts.set_alias(self.store, actor, name, None)
        return {"deleted": name}

    # ---------------------------------------------------------------- usage

    def _get_usage(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        by = tuple(name for name in query.get("by", "").split(",") if name)
        with self.store.read() as connection:
            which = selection(connection, query)
            rows = reports.usage(connection, which, by, int(_number(query, "step", 60)))
            if "key" in by:
                names_by_id = {key.id: key.name for key in accounts.list_keys(connection, revoked=True)}
                rows = [row | {"key_name": names_by_id.get(row["key"], row["key"])} for row in rows]
        if query.get("format") == "csv":
            return Text(reports.as_csv(rows))
        return {"since": which.since, "until": which.until, "data": rows}

    def _get_ttft(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        """The distribution of TTFT: [{ms, count}], `ms` the middle of each bin."""
        with self.store.read() as connection:
            bins = reports.distribution(connection, selection(connection, query))
        return {
            "data": [{"ms": histogram.middle(bin), "count": count} for bin, count in sorted(bins.items())]
        }

    def _get_requests(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        with self.store.read() as connection:
            if names:
                row = reports.request(connection, names[0])
                if row is None:
                    raise ApiError(404, f"There is no request {names[0]!r}.", "not_found")
                return row
            limit = min(1000, max(1, int(_number(query, "limit", 100))))
            rows = reports.requests(
                connection,
                selection(connection, query),
                query.get("status"),
                query.get("order", "newest"),
                limit,
                max(0, int(_number(query, "offset", 0))),
            )
            names_by_id = {key.id: key.name for key in accounts.list_keys(connection, revoked=True)}
        return {"data": [row | {"key_name": names_by_id.get(row["key_id"], row["key_id"])} for row in rows]}

    def _get_audit(self, names: list[str], query: Query, body: bytes, actor: str) -> Any:
        with self.store.read() as connection:
            return {
                "data": accounts.audit_log(connection, min(1000, max(1, int(_number(query, "limit", 200)))))
            }


def own_usage(store: Store, key: Key, query_string: bytes) -> dict[str, Any]:
    """GET /v1/usage: the caller's own key, its limits and its use; nobody else's."""
    query = {name: values[-1] for name, values in parse_qs(query_string.decode("latin-1")).items()}
    query.pop("key", None)
    try:
        with store.read() as connection:
            which = selection(connection, query)
            which = reports.Selection(since=which.since, until=which.until, key_id=key.id, load_test=True)
            by = ("time",) if query.get("by") == "time" else ("model",)
            return {
                "key": show_key(key) | {"quota_use": reports.quotas(connection, key.id)},
                "since": which.since,
                "until": which.until,
                "data": reports.usage(connection, which, by, int(_number(query, "step", 60))),
            }
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value") from None


def show_key(key: Key) -> dict[str, Any]:
    """A key as the API shows it: neither secret nor digest."""
    return {
        "id": key.id,
        "name": key.name,
        "hint": f"{key.hint}…",
        "role": key.role,
        "plan": key.plan.name if key.plan else None,
        "models": sorted(key.models) if key.models is not None else None,
        "tags": sorted(key.tags),
        "rpm": key.rpm,
        "tpm": key.tpm,
        "max_concurrency": key.max_concurrency,
        "quotas": {kind: value for kind, value in key.limits if kind.startswith("quota")},
        "load_test": key.load_test,
        "priority": key.priority,
        "expires_at": key.expires_at,
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def show_plan(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "name": plan.name,
        "models": sorted(plan.models) if plan.models is not None else None,
        "quota_5h": plan.quota_5h,
        "quota_week": plan.quota_week,
        "quota_month": plan.quota_month,
        "priority": plan.priority,
        "upstream": plan.upstream,
        "created_at": plan.created_at,
    }


def selection(connection: sa.Connection, query: Query) -> reports.Selection:
    """since, until (seconds since the epoch; default: the last hour), key (name or id), model, upstream,
    load_test.
    """
    until = _number(query, "until", time.time() + 1)
    since = _number(query, "since", until - 3600)
    if since > until:
        raise ConfigError("since: must not be after until")
    key = query.get("key")
    return reports.Selection(
        since=since,
        until=until,
        key_id=accounts.find_key(connection, key).id if key else None,
        model=query.get("model"),
        upstream=query.get("upstream"),
        load_test=_flag(query, "load_test"),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not a JSON object: {error}", "invalid_json") from None


def _one(names: list[str]) -> str:
    if len(names) != 1:
        raise ApiError(404, "Name one, as in /admin/v1/keys/NAME.", "not_found")
    return names[0]


def _kind_and_name(names: list[str]) -> tuple[str, str]:
    if len(names) < 2 or names[0] not in ("prices", "aliases"):
        raise ApiError(404, "Known: models/prices/MODEL and models/aliases/NAME.", "not_found")
    return names[0], "/".join(names[1:])


def _number(query: Query, name: str, default: float) -> float:
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e12:
        raise ConfigError(f"{name}: must be a number")
    return value


def _flag(query: Query, name: str) -> bool:
    return query.get(name, "").lower() in ("1", "true", "yes")
