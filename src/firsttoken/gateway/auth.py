"""The one seam that turns a request into a key. Every route that isn't public goes through `authenticate`."""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Executor

from firsttoken.gateway import accounts
from firsttoken.gateway.accounts import Key
from firsttoken.gateway.errors import ApiError
from firsttoken.gateway.store import Store

REFRESH_S = 0.5
"""How long a change made in another process takes to be noticed, at most; one tiny query per interval."""
UNKNOWN_MAX = 10_000


class KeyRing:
    """All live keys in memory, by digest; refreshed when the store's `settings_version` moves."""

    def __init__(self, store: Store, executor: Executor):
        self.store, self.executor = store, executor
        self.version = -1
        self.by_digest: dict[str, Key] = {}
        self.by_id: dict[str, Key] = {}
        self.aliases: dict[str, str] = {}
        self.unknown: OrderedDict[str, int] = OrderedDict()
        """Digests that the store did not know at this version: guessing costs no query each."""

    async def refresh(self) -> bool:
        """Loads keys and aliases again if anything changed; says whether."""
        loaded = await asyncio.get_running_loop().run_in_executor(self.executor, self._load, self.version)
        if loaded is None:
            return False
        self.version, keys, self.aliases = loaded
        self.by_digest = {key.digest: key for key in keys}
        self.by_id = {key.id: key for key in keys}
        return True

    def _load(self, known: int) -> tuple[int, list[Key], dict[str, str]] | None:
        with self.store.read() as connection:
            version = accounts.settings_version(connection)
            if version == known:
                return None
            return version, accounts.load_keys(connection), accounts.load_aliases(connection)

    def find(self, secret: str) -> Key | None:
        """The key of this secret, compared in constant time.

        The dictionary's own look-up may leak timing only about a SHA-256 that the caller can't steer.
        """
        digest = accounts.digest(secret)
        key = self.by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    async def authenticate(
        self, headers: Iterable[tuple[bytes, bytes]], now: float, admin: bool = False
    ) -> Key:
        """The key that the headers carry. ApiError 401 without a valid one, 403 if it must be an admin's."""
        secret = bearer(headers)
        if not secret:
            raise ApiError(
                401, "No API key given: send it as 'Authorization: Bearer KEY'.", "missing_api_key"
            )
        key = self.find(secret)
        if key is None:
            key = await self._find_new(secret)
        if key is None:
            raise ApiError(401, "Incorrect API key provided.", "invalid_api_key")
        if key.expires_at is not None and now >= key.expires_at:
            raise ApiError(401, "This API key has expired.", "expired_api_key")
        if admin and key.role != "admin":
            raise ApiError(403, "This needs an admin key.", "admin_only")
        return key

    async def _find_new(self, secret: str) -> Key | None:
        """A key made a moment ago by another process: look once per version."""
        digest = accounts.digest(secret)
        if self.unknown.get(digest) == self.version:
            return None
        await self.refresh()
        self.unknown[digest] = self.version
        if len(self.unknown) > UNKNOWN_MAX:
            self.unknown.popitem(last=False)
        return self.find(secret)


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The secret in `Authorization: Bearer …`, or in `x-api-key` as Anthropic's clients send it."""
    fallback = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            fallback = value.strip().decode("latin-1")
    return fallback
