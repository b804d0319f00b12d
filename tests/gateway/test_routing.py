"""The router: least expected TTFT, warm prefixes, and who may use what."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from firsttoken.gateway.accounts import Key, Plan
from firsttoken.gateway.config import AliasConfig
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.routing import BLOCK, TABLE_SIZE, Router, chain
from firsttoken.gateway.upstreams import Upstream

KEY = Key(id="k", name="k", digest="", hint="", role="client")


def upstream(name: str, *models: str, **values: Any) -> Upstream:
    """An upstream without its connections: the router never opens one."""
    one = Upstream.__new__(Upstream)
    one.config = SimpleNamespace()  # type: ignore[assignment]
    one.name, one.models, one.weight = name, frozenset(models or ("m",)), 1.0
    one.healthy, one.failures, one.in_flight, one.waiting, one.service_s = True, 0, 0, 0, 0.1
    for field, value in values.items():
        setattr(one, field, value)
    return one


def router(*upstreams: Upstream, **aliases: AliasConfig) -> Router:
    one = Router()
    one.update({up.name: up for up in upstreams}, aliases, {}, None)
    return one


def names(one: Router, model: str = "m", key: Key = KEY, prompt: bytes = b"") -> list[str]:
    return [candidate.upstream.name for candidate in one.route(model, key, prompt).candidates]


def test_the_least_expected_ttft_wins() -> None:
    fast, slow = upstream("fast", service_s=0.1), upstream("slow", service_s=0.3)
    one = router(fast, slow)
    assert names(one) == ["fast", "slow"]
    fast.waiting = 3  # four times 0.1 s is more than 0.3 s
    assert names(one) == ["slow", "fast"]
    fast.weight = 2.0
    assert names(one) == ["fast", "slow"]


def test_what_was_never_measured_is_tried() -> None:
    assert names(router(upstream("known", service_s=0.001), upstream("new", service_s=None)))[0] == "new"


def test_a_conversation_returns_to_its_warm_upstream_until_others_queue_there() -> None:
    ups = [upstream(f"u{i}") for i in range(4)]
    one = router(*ups)
    conversation = b"system prompt " * 200
    home = one.route("m", KEY, conversation)
    warm = home.candidates[-1].upstream  # wherever it went
    one.sent(home.prefix, warm)
    longer = conversation[: len(conversation) // BLOCK * BLOCK] + b" and the next question" * 10
    assert names(one, prompt=longer)[0] == warm.name
    warm.waiting = 1
    assert names(one, prompt=longer)[0] != warm.name


def test_new_prefixes_spread_and_agree_across_processes() -> None:
    first, second = (router(*(upstream(f"u{i}") for i in range(4))) for _ in range(2))
    prompts = [f"prompt {i} ".encode() * 100 for i in range(200)]
    homes = [names(first, prompt=prompt)[0] for prompt in prompts]
    assert homes == [names(second, prompt=prompt)[0] for prompt in prompts]
    assert min(Counter(homes).values()) > 25


def test_the_table_of_prefixes_is_bounded() -> None:
    one = router(upstream("a"), upstream("b"))
    for start in range(0, TABLE_SIZE * 2, 50):
        one.sent(list(range(start, start + 50)), one.upstreams["a"])
    assert len(one.prefixes) == TABLE_SIZE
    assert len(chain(b"x" * 10**6)) == 64


def test_aliases_fallbacks_and_what_a_key_may_use() -> None:
    one = router(upstream("a", "m"), upstream("b", "n"), chat=AliasConfig(model="m", fallbacks=["n"]))
    assert names(one, "chat") == ["a", "b"]
    assert one.names(KEY) == ["chat", "m", "n"]
    only_chat = Key(id="k", name="k", digest="", hint="", role="client", models=frozenset({"chat"}))
    assert names(one, "chat", only_chat) == ["a", "b"]
    assert one.names(only_chat) == ["chat"]
    with pytest.raises(ApiError) as refused:
        names(one, "m", only_chat)
    assert refused.value.status == 404
    one.update(one.upstreams, one.aliases, {"chat": "n"}, "chat")  # switched at run time, and the default
    assert next((c.upstream.name, c.model) for c in one.route(None, KEY, b"").candidates) == ("b", "n")


def test_a_plan_may_pin_an_upstream() -> None:
    plan = Plan(id="p", name="p", upstream="b")
    pinned = Key(id="k", name="k", digest="", hint="", role="client", plan=plan)
    assert names(router(upstream("a"), upstream("b")), key=pinned) == ["b"]
    with pytest.raises(ApiError) as refused:
        names(router(upstream("a")), key=pinned)
    assert refused.value.status == 503


def test_upstreams_that_are_down_come_last_and_are_tried_when_all_are() -> None:
    a, b = upstream("a", healthy=False), upstream("b", service_s=5.0)
    one = router(a, b)
    assert names(one) == ["b"]
    b.failed("refused")
    b.failed("refused")
    assert set(names(one)) == {"a", "b"}
    b.succeeded()
    assert names(one) == ["b"]


def test_the_measured_service_time_is_per_waiting_request() -> None:
    one = upstream("a", service_s=None)
    one.observe(0.3, ahead=2)
    assert one.service_s == pytest.approx(0.1)
    one.waiting = 2
    assert one.expected_ttft() == pytest.approx(0.3)
