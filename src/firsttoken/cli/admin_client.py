"""How `keys` and `plans` talk to a running gateway: its admin API, and nothing else."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

from firsttoken.engine.config import ConfigError

URL_VARIABLE, KEY_VARIABLE = "FIRSTTOKEN_GATEWAY_URL", "FIRSTTOKEN_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of `/admin/v1/PATH`. ConfigError, one line, if it isn't a success.

    The key comes from the environment only: on a command line every user of the machine could read it.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise ConfigError(f"set {KEY_VARIABLE} to an admin key (the gateway's first start shows one)")
    url = os.environ.get(URL_VARIABLE, DEFAULT_URL).rstrip("/")
    request = urllib.request.Request(
        f"{url}/admin/v1/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {error.code}"
        raise ConfigError(message) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no gateway answers at {url} ({reason}); set {URL_VARIABLE}") from None


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")
