"""The block pool against a plain model of what it promises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from firsttoken.engine.blocks import BlockPool, OutOfBlocks, chain_hashes, root_hash


def test_a_hash_covers_everything_before_it_and_the_salt():
    tokens = list(range(64))
    hashes = chain_hashes(root_hash(None), tokens, 0, 16)
    assert len(hashes) == len(set(hashes)) == 4
    assert chain_hashes(hashes[1], tokens, 32, 16) == hashes[2:]
    other = [99, *tokens[1:]]
    assert not set(chain_hashes(root_hash(None), other, 0, 16)) & set(hashes)
    assert not set(chain_hashes(root_hash("salt"), tokens, 0, 16)) & set(hashes)
    assert chain_hashes(root_hash(None), tokens[:15], 0, 16) == []


def test_neighbours_are_preferred_and_room_is_kept():
    pool = BlockPool(64, 16)
    a = pool.allocate(4, room=8)
    b = pool.allocate(4, room=8)
    a += pool.allocate(8, after=a[-1])
    assert a == list(range(a[0], a[0] + 12)), "the room behind a was not kept for it"
    assert b == list(range(b[0], b[0] + 4))
    pool.release(b)
    pool.release(a)
    assert pool.allocate(64) == list(range(64))


def test_the_least_recently_used_block_goes_first_and_a_tail_before_its_prefix():
    pool = BlockPool(4, 16)
    hashes = chain_hashes(root_hash(None), list(range(64)), 0, 16)
    blocks = pool.allocate(4)
    for block, h in zip(blocks, hashes, strict=True):
        pool.register(block, h)
    pool.release(blocks)
    assert pool.match(hashes) == blocks
    pool.allocate(1)
    assert pool.match(hashes) == blocks[:3]
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])  # used again: now the youngest
    pool.allocate(2)
    assert pool.match(hashes) == blocks[:1]


def test_pins_keep_blocks_until_their_time_and_at_most_half_of_the_pool():
    pool = BlockPool(8, 16)
    hashes = chain_hashes(root_hash(None), list(range(96)), 0, 16)
    blocks = pool.allocate(6)
    for block, h in zip(blocks, hashes, strict=True):
        pool.register(block, h)
    pool.pin(blocks, until=10.0)
    pool.release(blocks)
    assert (pool.num_pinned, pool.num_used, pool.num_free) == (4, 0, 4)
    with pytest.raises(OutOfBlocks):
        pool.allocate(5)
    pool.drop_pins(9.9)
    assert pool.num_pinned == 4
    pool.drop_pins(10.0)
    assert (pool.num_pinned, pool.num_free) == (0, 8)
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, share, grow and go in any order; a dictionary of references says what must hold."""

    @initialize(count=st.integers(1, 24))
    def start(self, count: int) -> None:
        self.pool = BlockPool(count, 4)
        self.tables: list[list[int]] = []
        self.serial = 0

    @rule(count=st.integers(1, 6), room=st.integers(0, 6))
    def allocate(self, count: int, room: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count, room=room)
            assert self.pool.num_free == free, "a failed allocation took blocks"
        else:
            held = {b for t in self.tables for b in t}
            blocks = self.pool.allocate(count, room=room)
            assert len(set(blocks)) == count
            assert not set(blocks) & held, "a block in use was handed out"
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if self.pool.num_free:
            table += self.pool.allocate(1, after=table[-1] if table else None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.serial += 1
            if self.pool.hash_of[block] is None:
                self.pool.register(block, self.serial.to_bytes(16, "big"))

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        h = data.draw(st.sampled_from(sorted(self.pool.cached)))
        blocks = self.pool.match([h])
        self.pool.acquire(blocks)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), until=st.integers(0, 20))
    def pin(self, data: st.DataObject, until: int) -> None:
        self.pool.pin(data.draw(st.sampled_from(self.tables)), until)

    @rule(now=st.integers(0, 20))
    def drop_pins(self, now: int) -> None:
        self.pool.drop_pins(now)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not any(self.tables))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_used == len({b for t in self.tables for b in t})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
