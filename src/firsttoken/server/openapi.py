"""The OpenAPI document, made of the structs that check the bodies: what it says is what is checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from firsttoken import __version__
from firsttoken.server.http import Connection
from firsttoken.server.serving import Serving

_TAG = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    400: "A parameter is wrong, unknown or not supported; the error names it.",
    401: "The key is missing or wrong.",
    404: "There is no such model or route.",
    405: "The route has other methods.",
    409: "Not possible while requests are running.",
    413: "The body is too large.",
    503: "The engine is starting, restarting or ending.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path, and what the document says of it."""

    method: str
    path: str
    """`{name}` at the end takes the rest of the path."""
    handler: Callable[[Connection, Serving], Awaitable[None]]
    summary: str
    body: type[msgspec.Struct] | None = None
    media_types: tuple[str, ...] = ("application/json",)
    errors: tuple[int, ...] = (401, 503)
    is_open: bool = False
    """Served without a key: probes and scrapers have none."""


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    routes = list(routes)
    bodies = {route.body for route in routes if route.body is not None}
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_TAG)
    for schema in schemas.values():
        _allow_null(schema)
    schemas["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "firsttoken", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.summary.split(":")[0].lower().replace(" ", "_"),
        "responses": {
            "200": {"description": "OK", "content": {media: {} for media in route.media_types}},
            **{
                str(status): {
                    "description": _ERRORS[status],
                    "content": {"application/json": {"schema": {"$ref": _TAG.format(name="Error")}}},
                }
                for status in route.errors
            },
        },
    }
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1 : route.path.index("}")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if route.body is not None:
        schema = {"$ref": _TAG.format(name=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if not route.is_open:
        operation["security"] = [{"key": []}, {}]
    return operation


def _allow_null(schema: dict[str, Any]) -> None:
    """null stands for the default of every parameter that has one."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        if name not in required and {"type": "null"} not in field.get("anyOf", ()):
            description = field.pop("description", None)
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]} | (
                {"description": description} if description else {}
            )
