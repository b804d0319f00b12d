"""`firsttoken probe`: one streamed request to any OpenAI-compatible server, and where its time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from firsttoken.bench import metrics
from firsttoken.bench.client import Call, Client, ClientHealth, Record, Refused, watch_client
from firsttoken.bench.stamped_http import Http, Unreachable
from firsttoken.engine.config import ConfigError

PROMPT = "In three sentences: why does the first word of an answer matter more to a reader than the last?"


@dataclass(slots=True, kw_only=True)
class Probe:
    url: str
    model: str
    records: list[Record] = field(default_factory=list)
    health: ClientHealth = field(default_factory=ClientHealth)

    def json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self.model,
            "requests": [summary(record) | {"raw": asdict(record)} for record in self.records],
            "client": asdict(self.health) | {"warning": self.warning()},
            "definitions": {key: metric.formula for key, metric in metrics.METRICS.items() if key in SHOWN},
        }

    def warning(self) -> str | None:
        return self.health.verdict(_seconds(metrics.over_requests("ttft", self.records, 50)))


SHOWN = ("ttfb", "ttft", "ttfvt", "tpot", "icl_max", "tokens_per_chunk", "duration")


def summary(record: Record) -> dict[str, Any]:
    """The figures of one request: metrics in their units, counts, and the parts of the first token's time."""
    figures: dict[str, Any] = {key: metrics.METRICS[key](record) for key in SHOWN}
    rate = None
    if record.ok and record.completion_tokens and record.ended:
        rate = record.completion_tokens / record.ended
    return figures | {
        "tokens_per_second": rate,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "parts": first_token_parts(record),
    }


PARTS = {
    "tokenise": "prompt template and tokeniser",
    "queue": "arrived, not yet scheduled",
    "prefill": "computing the prompt, up to the first token",
    "server": "the rest inside the server: HTTP, processes, text",
    "elsewhere": "network and client, and what the server does not account for",
}
"""Name → meaning of the parts that a TTFT is made of, in order."""


def first_token_parts(record: Record) -> dict[str, float] | None:
    """The parts of the TTFT in ms, as far as the server says; None if it says nothing of them.

    They add up to the TTFT. `first_decode`, the step to the second token, is given beside them."""
    total, said = metrics.ttft(record), record.server
    if total is None or not ({"queue", "prefill"} & said.keys()):
        return None
    parts: dict[str, float] = {name: said[name] * 1e3 for name in ("queue", "prefill") if name in said}
    if "tokenize" in said:
        parts["tokenise"] = (said["tokenize"] + said.get("template", 0.0)) * 1e3
    if "first_token" in said:
        parts["server"] = max(0.0, said["first_token"] * 1e3 - sum(parts.values()))
    parts["elsewhere"] = max(0.0, total - sum(parts.values()))
    parts = {name: parts[name] for name in PARTS if name in parts}
    if "first_decode" in said:
        parts["first_decode"] = said["first_decode"] * 1e3
    return parts


async def connect(http: Http, api_key: str | None, model: str | None = None) -> Client:
    """A client of the server's first model (or of `model`). Raises ConfigError that names what to change."""
    client = Client(http, model or "", api_key)
    if model:
        return client
    try:
        listing = await client.get_json("/v1/models")
        client.model = listing["data"][0]["id"]
    except Unreachable as error:
        raise ConfigError(f"{error}; is the server up, and the address right?") from None
    except Refused as error:
        if error.status in (401, 403):
            raise ConfigError(
                f"{http.base_url} wants a valid key: give --api-key or OPENAI_API_KEY ({error})"
            ) from None
        raise ConfigError(
            f"{http.base_url} does not look like an OpenAI-compatible server: {error}."
            " Give the address up to, but without, /v1"
        ) from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{http.base_url}/v1/models lists no model; name one with --model") from None
    return client


def base_url(url: str) -> str:
    """The address without a trailing /v1, as users paste it from client settings."""
    return url.rstrip("/").removesuffix("/v1")


async def probe(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    prompt: str = PROMPT,
    max_tokens: int = 64,
    repeat: int = 1,
    time_limit: float = 120.0,
) -> Probe:
    """Sends `repeat` requests, one after another. A failed one is a record; for errors see `connect`."""
    try:
        http = Http(base_url(url), timeout=time_limit)
    except Unreachable as error:
        raise ConfigError(str(error)) from None
    async with http:
        client = await connect(http, api_key, model)
        result = Probe(url=http.base_url, model=client.model)
        call = Call(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, name="probe")
        async with watch_client() as health:
            for _ in range(repeat):
                result.records.append(await client.stream(call))
        result.health = health
        return result


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
