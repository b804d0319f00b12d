"""Writes docs/api-parameters.md from the tables in firsttoken/server/schemas.py; a test holds the two equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from firsttoken.server.schemas import ACCEPTED, REFUSED, ChatRequest, CompletionRequest, Generation

PAGE = Path(__file__).with_name("api-parameters.md")

HEAD = """# Parameters of the API

Made by `python docs/make_api_parameters.py` from the tables that check the requests. `null` stands for the default
of any parameter that has one. Everything that is not on this page is answered with status 400, which names it and
the nearest known name.

"""


def honoured(kind: type[msgspec.Struct], shown: set[str]) -> str:
    """A table of the struct's parameters that are not in `shown`."""
    _, components = msgspec.json.schema_components([kind])
    properties: dict[str, dict[str, Any]] = components[kind.__name__]["properties"]
    lines = ["| parameter | takes | meaning |", "|---|---|---|"]
    for name in kind.__struct_fields__:
        if name not in shown:
            field = properties[name]
            lines.append(f"| `{name}` | {takes(field)} | {field['description']}{default(field)} |")
    return "\n".join(lines) + "\n\n"


def takes(field: dict[str, Any]) -> str:
    options = field.get("anyOf", [field])
    return " or ".join(one(option) for option in options if option.get("type") != "null")


def one(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "object")
    if kind == "array":
        items = schema.get("items", {})
        return f"list ({one(items)})" if items else "list"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or kind not in ("integer", "number"):
        return str({"boolean": "true or false", "string": "text"}.get(kind, kind))
    if abs(low) >= 2**31:
        return f"{kind} of {high.bit_length() + 1} bits"
    above = "above " if "exclusiveMinimum" in schema else ""
    return f"{kind}, {above}{low:g}" + (f" to {high:g}" if high is not None and high < 2**31 else " and more")


def default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value in (None, [], {}) or "Default:" in field["description"]:
        return ""
    return f" Default: {json.dumps(value)}."


def neutral(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in (None, *values))


def page() -> str:
    common = set(Generation.__struct_fields__)
    parts = [HEAD, "## Honoured by both routes\n\n", honoured(Generation, set())]
    parts += ["## Honoured by /v1/chat/completions\n\n", honoured(ChatRequest, common)]
    parts += ["## Honoured by /v1/completions\n\n", honoured(CompletionRequest, common)]
    parts += ["## Accepted without effect\n\n| parameter | why it has none |\n|---|---|\n"]
    parts += [f"| `{name}` | {why} |\n" for name, why in ACCEPTED.items()]
    parts += ["\n## Refused\n\nStatus 400, unless the value is neutral.\n\n"]
    parts += ["| parameter | neutral | reason, or what to do instead |\n|---|---|---|\n"]
    parts += [
        f"| `{name}` | {neutral(values)} | {instead} |\n" for name, (values, instead) in REFUSED.items()
    ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
