"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}`, code a string or null."""

from __future__ import annotations

import json
import math
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(Exception):
    """An answer other than 200; the message is fit for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers: list[tuple[bytes, bytes]] = []
        if retry_after is not None:
            self.headers.append((b"retry-after", str(max(1, math.ceil(retry_after))).encode()))

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.code, self.param)

    def event(self, anthropic: bool = False) -> bytes:
        """The same as an event of a stream that has begun, and the stream's end."""
        if anthropic:
            error = {"type": "error", "error": {"type": "api_error", "message": self.message}}
            return b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    error: dict[str, Any] = {
        "message": message,
        "type": TYPES.get(status, "server_error"),
        "param": param,
        "code": code,
    }
    return json.dumps({"error": error}).encode()
