"""The OpenAPI document, and requests made up from it: none ends in a 500, none hangs."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from firsttoken.server.app import App
from firsttoken.server.config import ServerConfig
from firsttoken.server.schemas import ChatRequest

from .running import Running

EXAMPLES = 60
"""Per route and mode; about 12 routes."""


def document() -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.json.decode(App(ServerConfig(dev_mode=True))._openapi)
    return found


SCHEMA = schemathesis.openapi.from_dict(document())


@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_no_request_breaks_the_server(case: schemathesis.Case, server: Running) -> None:
    response = case.call(base_url=server.url, timeout=20)
    case.validate_response(
        response, checks=[not_a_server_error, status_code_conformance, content_type_conformance]
    )


def test_the_document_says_what_is_checked(server: Running) -> None:
    served = server.request("GET", "/openapi.json").json
    assert served == document()
    properties = served["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(properties) == set(ChatRequest.__struct_fields__)
    assert all(field.get("description") for field in properties.values())
    assert served["paths"].keys() >= {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/metrics",
        "/version",
    }  # fmt: skip
