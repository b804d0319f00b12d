"""KV blocks: allocate, share by prefix hash, evict, pin. Pure Python; every operation is O(blocks touched).

A block is in exactly one state:

  in use     ref > 0: at least one sequence's table (or a pin) holds it
  cached     ref = 0 with a hash: reusable by prefix, evicted least recently used first
  blank      ref = 0 without a hash: nothing worth keeping

Blank blocks are handed out before cached ones are evicted, and neighbours are preferred: on a CPU a sequence
whose blocks are consecutive is read as one view, without a gather.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Sequence as Seq

_IN_USE, _BLANK, _SPOKEN_FOR = 0, 1, 2


def root_hash(salt: str | None) -> bytes:
    """Start of a hash chain: prefixes match only between requests of one `cache_salt`."""
    return hashlib.blake2b((salt or "").encode(), digest_size=16, person=b"firsttoken-salt").digest()


def chain_hashes(previous: bytes, token_ids: Seq[int], start: int, block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` from position `start` (a multiple of block_size) on.

    A block's hash covers the previous block's hash and its own tokens, so equal hashes mean equal prefixes
    (up to collisions of 128-bit BLAKE2b).
    """
    hashes = []
    for i in range(start, len(token_ids) - block_size + 1, block_size):
        previous = hashlib.blake2b(
            array("q", token_ids[i : i + block_size]).tobytes(), digest_size=16, key=previous
        ).digest()
        hashes.append(previous)
    return hashes


class OutOfBlocks(Exception):
    """No free block is left; the scheduler preempts somebody."""


class BlockPool:
    """All KV blocks of an engine. Not thread-safe: the engine's loop owns it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.cached: dict[bytes, int] = {}
        # Least recently used first. Python dicts keep insertion order and delete in O(1), which is all an LRU
        # list needs: blocks enter at the end when their last reference goes.
        self._evictable: dict[int, None] = {}
        self._blank = bytearray([_BLANK]) * num_blocks
        self._num_blank = num_blocks
        self._pins: list[tuple[float, int, list[int]]] = []
        self._pin_count: dict[int, int] = {}
        self._pin_serial = 0

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: blank, or cached without a reference."""
        return self._num_blank + len(self._evictable)

    @property
    def num_pinned(self) -> int:
        """Blocks that a pin keeps from eviction."""
        return len(self._pin_count)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence holds (pins alone do not count)."""
        idle_pinned = sum(1 for b, n in self._pin_count.items() if self.ref[b] == n)
        return self.num_blocks - self.num_free - idle_pinned

    # -- prefixes -------------------------------------------------------------------------------------------

    def match(self, hashes: Seq[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `hashes`; takes no reference."""
        blocks = []
        for h in hashes:
            block = self.cached.get(h)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_evictable(self, blocks: Seq[int]) -> int:
        """How many of `blocks` are free now, so that acquiring them lowers `num_free`."""
        return sum(1 for b in blocks if self.ref[b] == 0)

    def acquire(self, blocks: Seq[int]) -> None:
        """Takes a reference on matched blocks."""
        for b in blocks:
            if self.ref[b] == 0:
                del self._evictable[b]
            self.ref[b] += 1

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a computed, full block findable. Of two blocks with equal content the first one stays known."""
        if self.hash_of[block] is None and block_hash not in self.cached:
            self.hash_of[block] = block_hash
            self.cached[block_hash] = block

    # -- allocation -----------------------------------------------------------------------------------------

    def allocate(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """`count` fresh blocks, each with one reference. Raises OutOfBlocks without taking any.

        after: the sequence's last block; its neighbours are preferred.
        room: blocks that the sequence will probably want next; a run with that much room behind is preferred
        and marked, so that other sequences start elsewhere while there is space.
        """
        if count > self.num_free:
            raise OutOfBlocks
        taken: list[int] = []
        if after is not None:
            block = after + 1
            while len(taken) < count and block < self.num_blocks and self._blank[block] != _IN_USE:
                self._take_blank(block)
                taken.append(block)
                block += 1
        if (missing := count - len(taken)) and self._num_blank >= missing:
            start = -1
            for want in (missing + room, missing):
                if (start := self._blank.find(bytes([_BLANK]) * want)) >= 0:
                    for block in range(start, start + missing):
                        self._take_blank(block)
                    for block in range(start + missing, start + want):
                        self._blank[block] = _SPOKEN_FOR
                    taken.extend(range(start, start + missing))
                    break
        while (missing := count - len(taken)) and self._num_blank:
            block = self._blank.find(bytes([_BLANK]))
            if block < 0:
                block = self._blank.find(bytes([_SPOKEN_FOR]))
            self._take_blank(block)
            taken.append(block)
        if missing := count - len(taken):
            # Blocks of one former sequence left together, last block first: sorted they are neighbours again.
            victims = []
            for _ in range(missing):
                block = next(iter(self._evictable))
                del self._evictable[block]
                self._forget(block)
                victims.append(block)
            taken.extend(sorted(victims))
        for block in taken:
            self.ref[block] = 1
        return taken

    def release(self, blocks: Seq[int]) -> None:
        """Drops a reference on each block. The last block becomes evictable first: a prefix outlives its tail."""
        if blocks:
            block = blocks[-1] + 1
            while block < self.num_blocks and self._blank[block] == _SPOKEN_FOR:
                self._blank[block] = _BLANK
                block += 1
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                if self.hash_of[block] is None:
                    self._blank[block] = _BLANK
                    self._num_blank += 1
                else:
                    self._evictable[block] = None

    def reset_cache(self) -> bool:
        """Forgets every cached prefix and pin. False (and no change) while a sequence holds a block."""
        self.drop_pins(float("inf"))
        if self.num_used:
            return False
        for block in self._evictable:
            self._forget(block)
            self._blank[block] = _BLANK
            self._num_blank += 1
        self._evictable.clear()
        return True

    # -- pins -----------------------------------------------------------------------------------------------

    def pin(self, blocks: Seq[int], until: float) -> None:
        """Keeps cached blocks from eviction until a time (`time.monotonic` seconds). At most half of the pool
        can be pinned; what is over that is left unpinned."""
        fresh = [b for b in blocks if self.hash_of[b] is not None]
        allowed = self.num_blocks // 2 - self.num_pinned
        kept = []
        for b in fresh:
            if b not in self._pin_count:
                if allowed <= 0:
                    break
                allowed -= 1
            kept.append(b)
        if not kept:
            return
        self.acquire(kept)
        for b in kept:
            self._pin_count[b] = self._pin_count.get(b, 0) + 1
        self._pin_serial += 1
        heapq.heappush(self._pins, (until, self._pin_serial, kept))

    def drop_pins(self, now: float) -> None:
        """Releases the pins that have run out."""
        while self._pins and self._pins[0][0] <= now:
            self._drop_first_pin()

    def drop_one_pin(self) -> bool:
        """Releases the pin that ends soonest, for a request that could not run otherwise."""
        if not self._pins:
            return False
        self._drop_first_pin()
        return True

    def _drop_first_pin(self) -> None:
        _, _, blocks = heapq.heappop(self._pins)
        for b in blocks:
            self._pin_count[b] -= 1
            if not self._pin_count[b]:
                del self._pin_count[b]
        self.release(blocks)

    # -- internals ------------------------------------------------------------------------------------------

    def _take_blank(self, block: int) -> None:
        self._blank[block] = _IN_USE
        self._num_blank -= 1

    def _forget(self, block: int) -> None:
        h = self.hash_of[block]
        if h is not None:
            del self.cached[h]
            self.hash_of[block] = None

    def check(self) -> None:
        """Asserts the pool's invariants; for tests."""
        blank = [b for b in range(self.num_blocks) if self._blank[b] != _IN_USE]
        assert len(blank) == self._num_blank
        assert all(self.ref[b] == 0 and self.hash_of[b] is None for b in blank)
        assert all(self.ref[b] == 0 and self.hash_of[b] is not None for b in self._evictable)
        assert not set(blank) & set(self._evictable)
        free = set(blank) | set(self._evictable)
        assert all((self.ref[b] == 0) == (b in free) for b in range(self.num_blocks))
        assert all(self.hash_of[b] == h for h, b in self.cached.items())
        assert len(self.cached) == sum(h is not None for h in self.hash_of)
