"""Who is signed in: sessions in memory, and a brake on guessing.

A session holds the admin key that its owner signed in with, in this process alone; the browser gets a random
name of the session in a cookie that no script can read. A restart signs everybody out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

IDLE_S = 2 * 3600.0
"""A session ends when nobody has opened a page or pressed a button for so long."""
LIFE_S = 12 * 3600.0
"""And in any case after this."""
SESSIONS_MAX = 1000

ATTEMPTS = 8
"""Failed attempts that an address may make within `WINDOW_S`."""
WINDOW_S = 300.0
ADDRESSES_MAX = 10_000


@dataclass(slots=True)
class Session:
    key: str = field(repr=False)
    """The admin key itself; it never leaves this process except to the gateway."""
    owner: str
    """The name of that key."""
    token: str = field(repr=False)
    """Against forged forms (CSRF): each form that changes something carries it."""
    digest: str
    started: float
    used: float
    ended: bool = False


class Sessions:
    """All of them. `clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.by_digest: OrderedDict[str, Session] = OrderedDict()

    def start(self, key: str, owner: str) -> tuple[str, Session]:
        """A new session and its name for the cookie, of which only a digest is kept."""
        name, now = secrets.token_urlsafe(32), self.clock()
        session = Session(
            key=key,
            owner=owner,
            token=secrets.token_urlsafe(32),
            digest=_digest(name),
            started=now,
            used=now,
        )
        self.by_digest[session.digest] = session
        while len(self.by_digest) > SESSIONS_MAX:
            self.end(next(iter(self.by_digest.values())))
        return name, session

    def find(self, name: str | None) -> Session | None:
        """The live session of that name, compared in constant time."""
        if not name:
            return None
        digest = _digest(name)
        session = self.by_digest.get(digest)
        if session is None or not hmac.compare_digest(session.digest, digest):
            return None
        return session if self.live(session) else None

    def live(self, session: Session) -> bool:
        now = self.clock()
        if now - session.used >= IDLE_S or now - session.started >= LIFE_S:
            self.end(session)
        return not session.ended

    def touch(self, session: Session) -> None:
        """Its owner did something. What pages do by themselves doesn't count."""
        session.used = self.clock()

    def end(self, session: Session) -> None:
        session.ended, session.key = True, ""
        self.by_digest.pop(session.digest, None)


class Attempts:
    """Failed sign-ins of the last minutes, by address. An attempt counts as failed until it has succeeded.

    Keys of 256 random bits can't be guessed, so there is no limit on all addresses together: with one, anybody
    could keep the owner out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.by_address: OrderedDict[str, list[float]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Seconds until this address may try again; 0: now."""
        since = self.clock() - WINDOW_S
        recent = [at for at in self.by_address.pop(address, []) if at > since]
        if recent:
            self.by_address[address] = recent
        return recent[-ATTEMPTS] - since if len(recent) >= ATTEMPTS else 0.0

    def begin(self, address: str) -> None:
        """Before the key is judged, so that attempts at the same time don't slip under the limit."""
        self.by_address.setdefault(address, []).append(self.clock())
        if len(self.by_address) > ADDRESSES_MAX:
            self.by_address.popitem(last=False)

    def succeeded(self, address: str) -> None:
        self.by_address.pop(address, None)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
