"""Sessions end in time, and guessing is slow, whatever the order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.gateway.console.sessions import (
    ATTEMPTS,
    IDLE_S,
    LIFE_S,
    SESSIONS_MAX,
    WINDOW_S,
    Attempts,
    Sessions,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_session_ends_and_forgets_its_key() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    name, session = sessions.start("ft-secret", "ada")
    clock.now += IDLE_S - 1
    assert sessions.find(name) is session
    clock.now += 1
    assert sessions.find(name) is None
    assert session.key == ""
    assert not sessions.live(session)


def test_a_used_session_ends_too() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    name, session = sessions.start("ft-secret", "ada")
    while clock.now < 1000 + LIFE_S:
        assert sessions.find(name) is session
        sessions.touch(session)
        clock.now += IDLE_S / 2
    assert sessions.find(name) is None


def test_names_are_random_and_kept_as_digests_only() -> None:
    sessions = Sessions(Clock())
    names = {sessions.start("k", "ada")[0] for _ in range(50)}
    assert len(names) == 50
    assert not names & set(sessions.by_digest)
    assert sessions.find(next(iter(names))[:-1]) is None
    assert "ft-secret" not in repr(sessions.start("ft-secret", "ada"))
    assert sessions.find("") is None
    assert sessions.find(None) is None


def test_the_oldest_makes_room() -> None:
    sessions = Sessions(Clock())
    first, _ = sessions.start("k", "ada")
    last = [sessions.start("k", "ada")[0] for _ in range(SESSIONS_MAX)][-1]
    assert sessions.find(first) is None
    assert sessions.find(last) is not None


@given(st.lists(st.tuples(st.floats(0, 120), st.sampled_from("ab")), max_size=80))
def test_no_window_holds_more_failures_than_allowed(steps: list[tuple[float, str]]) -> None:
    clock = Clock()
    attempts = Attempts(clock)
    failed: dict[str, list[float]] = {"a": [], "b": []}
    for pause, address in steps:
        clock.now += pause
        wait = attempts.wait(address)
        assert 0 <= wait <= WINDOW_S
        recent = [at for at in failed[address] if at > clock.now - WINDOW_S]
        assert (wait > 0) == (len(recent) >= ATTEMPTS)  # and it depends on this address alone
        if not wait:
            attempts.begin(address)
            failed[address].append(clock.now)


def test_after_the_wait_there_is_a_way_in() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(ATTEMPTS):
        attempts.begin("a")
        clock.now += 1
    clock.now += attempts.wait("a")
    assert attempts.wait("a") == 0
    attempts.succeeded("a")
    assert "a" not in attempts.by_address
