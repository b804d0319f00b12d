"""Drafts from decoder layers on the target's block ids: a whole checkpoint of its own (`separate`), or the target's own
first layers and a few tuned ones behind them (`shallow`).

Shared layers run on the target's weights and its KV cache: for computed tokens there is nothing to do in them. The
stream before the first tuned layer is captured from the target, so that only tuned layers are ever behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from firsttoken.engine.attention.base import Batch, SeqSpan
from firsttoken.engine.attention.paged import KVCache, PagedAttention
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.sequence import Sequence
from firsttoken.engine.speculation import Computed
from firsttoken.speculate.drafter import Judge, run_chain
from firsttoken.speculate.pending import Pending, PendingStates

CATCH_UP = 256
"""Most rows of a separate draft's catching up between two steps: what it has missed of prompts, and of texts that
went on while drafting did not pay."""
_BEHIND = 32
"""Rows that a sequence may be behind in the first drafting pass itself; more are computed before."""


class DraftLayers:
    """A draft's decoder and its cache; forward passes over parts of sequences."""

    def __init__(self, decoder: Decoder, target_cache: KVCache, *, shared: int) -> None:
        """decoder: its first `shared` layers are the target's. Its own layers get a cache on the target's blocks."""
        self.decoder, self.shared = decoder, shared
        config = decoder.config
        own = replace(
            config, num_layers=config.num_layers - shared, layer_windows=config.layer_windows[shared:]
        )
        cache = KVCache(own, target_cache.num_blocks, target_cache.block_size, decoder.dtype, decoder.device)
        cache.layers = target_cache.layers[:shared] + cache.layers
        self.cache = cache

    def advance(
        self, parts: list[tuple[Sequence | Computed, Pending]], *, query: bool
    ) -> torch.Tensor | None:
        """Computes every part's pending tokens and empties it; with `query`, the last known token of each too, whose
        position must have a block, and returns its output stream [S, H]."""
        decoder, device = self.decoder, self.decoder.device
        tokens: list[int] = []
        positions: list[int] = []
        spans: list[SeqSpan] = []
        queries: list[int] = []
        states: list[torch.Tensor] = []
        for item, pending in parts:
            seq = item.seq if isinstance(item, Computed) else item
            stop = pending.stop + query
            spans.append(SeqSpan(len(tokens), stop - pending.start, stop, item.block_table))
            tokens += seq.token_ids[pending.start : stop]
            positions.extend(range(pending.start, stop))
            queries.append(len(tokens) - 1)
            states += pending.states
            pending.start, pending.states = pending.stop, []
        batch = Batch(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), spans)
        last = torch.tensor(queries if query else [0], device=device)
        if not self.shared:
            hidden = decoder.embed(batch.token_ids)
        elif not query:
            hidden = torch.cat(states)
        else:
            hidden = self._with_queries(batch, last, states)
        attend = PagedAttention(decoder.config, self.cache, batch)
        # Without a query K and V are all that counts: the last layer's product is spared.
        stream = decoder.run_layers(hidden, batch.positions, attend, self.shared, last_rows=last)
        return stream if query else None

    def _with_queries(self, batch: Batch, last: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        """The stream before the first own layer [T, H]: captured for the pending rows, computed for the last ones."""
        ids, positions = batch.token_ids.index_select(0, last), batch.positions.index_select(0, last)
        spans = [SeqSpan(i, 1, span.context_len, span.block_table) for i, span in enumerate(batch.spans)]
        attend = PagedAttention(self.decoder.config, self.cache, Batch(ids, positions, spans))
        computed = self.decoder.run_layers(self.decoder.embed(ids), positions, attend, 0, self.shared)
        hidden = computed.new_empty((len(batch.token_ids), computed.shape[1]))
        if states:
            pending = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
            pending[last] = False
            hidden[pending] = torch.cat(states)
        hidden[last] = computed
        return hidden

    def step(self, tokens: torch.Tensor, tables: list[list[int]], positions: list[int]) -> torch.Tensor:
        """One token int64 [S] for each sequence at its position → the output stream [S, H]."""
        spans = [
            SeqSpan(i, 1, n + 1, table) for i, (table, n) in enumerate(zip(tables, positions, strict=True))
        ]
        batch = Batch(tokens, torch.tensor(positions, device=tokens.device), spans)
        attend = PagedAttention(self.decoder.config, self.cache, batch)
        return self.decoder.run_layers(self.decoder.embed(tokens), batch.positions, attend)


class _DecoderChain:
    """Implements `drafter.Chain`: drafted tokens are written at their positions in the sequences' own blocks, where
    the verification writes what stands there over them."""

    def __init__(
        self, layers: DraftLayers, token_ids: torch.Tensor, parts: list[tuple[Sequence, Pending]]
    ) -> None:
        self.token_ids = token_ids
        self._layers, self._parts = layers, parts
        self._tables = [seq.block_table for seq, _ in parts]
        self._positions = [seq.num_computed_tokens for seq, _ in parts]
        size, known = layers.cache.block_size, len(layers.decoder.rotary)
        self._last = [min(len(table) * size, known) - 1 for table in self._tables]
        """A sequence that has its count goes on with the others, and stays where its blocks end."""

    def first(self) -> torch.Tensor:
        stream = self._layers.advance([*self._parts], query=True)
        assert stream is not None
        return self._logits(stream)

    def then(self, tokens: torch.Tensor) -> torch.Tensor:
        self._positions = [min(n + 1, last) for n, last in zip(self._positions, self._last, strict=True)]
        return self._logits(self._layers.step(tokens, self._tables, self._positions))

    def _logits(self, stream: torch.Tensor) -> torch.Tensor:
        decoder = self._layers.decoder
        return decoder.logits(decoder.norm(stream))[:, : len(self.token_ids)]


def _room(decoder: Decoder, block_size: int, seq: Sequence, room: int) -> int:
    """At most `room` tokens: the input of each but the last needs a slot and a position that the draft knows."""
    slots = min(len(seq.block_table) * block_size, len(decoder.rotary))
    return max(0, min(room, slots - seq.num_computed_tokens))


class ShallowDrafter:
    """Implements `drafter.Drafter`: the target's first layers, shared, and a few tuned ones."""

    lookahead = 1

    def __init__(
        self,
        decoder: Decoder,
        target_cache: KVCache,
        token_ids: torch.Tensor,
        *,
        shared: int,
        num_layers: int,
        name: str,
    ) -> None:
        """decoder: see `shallow_draft`; token_ids: the target's id of each row of its head; num_layers: of the
        target."""
        self.name = name
        self.capture: tuple[int, ...] = (shared,)
        self.step_share = (decoder.config.num_layers + 1) / num_layers
        self.token_ids = token_ids
        self._layers = DraftLayers(decoder, target_cache, shared=shared)
        self._size = target_cache.block_size
        self._states = PendingStates(self._size)

    @torch.inference_mode()
    def computed(self, items: list[Computed], *, work: bool) -> None:
        """Whether or not there is to be `work`, full blocks are written: they are findable at once."""
        if due := list(self._states.take(items)):
            self._layers.advance([*due], query=False)

    def forget(self, seq: Sequence) -> None:
        self._states.forget(seq)

    def offers(self, seqs: list[Sequence], rooms: list[int]) -> list[int]:
        decoder = self._layers.decoder
        return [
            _room(decoder, self._size, seq, room) if self._states.ready(seq) else 0
            for seq, room in zip(seqs, rooms, strict=True)
        ]

    def catch_up(self, seqs: list[Sequence]) -> None:
        """Less than a block is ever pending."""

    @torch.inference_mode()
    def draft(self, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
        parts = [(seq, self._states.of(seq)) for seq in seqs]
        return run_chain(_DecoderChain(self._layers, self.token_ids, parts), seqs, counts, judge)


@dataclass(slots=True)
class _Lag:
    """The draft's cache holds positions [0, start) of a sequence, the target's [0, stop)."""

    start: int
    stop: int
    preemptions: int
    """The sequence's when this began: after another one its blocks are others."""


class SeparateDrafter:
    """Implements `drafter.Drafter`: a checkpoint with weights and a KV cache of its own.

    Nothing is captured, so whatever it has missed can be computed from the tokens: while drafting does not pay it does
    nothing at all. Each block remembers whether its draft part is whole, and a sequence that finds a block without
    one is as far behind as that.
    """

    lookahead = 1
    capture: tuple[int, ...] = ()

    def __init__(
        self, decoder: Decoder, target_cache: KVCache, *, vocab_size: int, num_layers: int, name: str
    ) -> None:
        """vocab_size, num_layers: of the target; ids at or above either vocabulary's end are padding."""
        self.name = name
        self.step_share = decoder.config.num_layers / num_layers
        self.token_ids = torch.arange(min(vocab_size, decoder.config.vocab_size), device=decoder.device)
        self._layers = DraftLayers(decoder, target_cache, shared=0)
        self._size = target_cache.block_size
        self._lags: dict[Sequence, _Lag] = {}
        self._whole = bytearray(target_cache.num_blocks)
        """By block: whether the draft's part of it is written, for the tokens that the target's part is of."""

    def computed(self, items: list[Computed], *, work: bool) -> None:
        """Notes what was computed; with `work`, computes at most `CATCH_UP` tokens of what is missing."""
        size = self._size
        for item in items:
            for block in item.block_table[item.start // size : -(-item.stop // size)]:
                self._whole[block] = False
            if not item.seq.block_table:
                continue  # ended or preempted
            lag = self._lags.get(item.seq)
            if lag is None or lag.preemptions != item.seq.num_preemptions:
                found = 0
                while found < item.start // size and self._whole[item.block_table[found]]:
                    found += 1
                lag = self._lags[item.seq] = _Lag(found * size, item.start, item.seq.num_preemptions)
            lag.stop = item.stop
        if work:
            self._catch_up([seq for seq in self._lags if self._ready(seq)], at_least=size)

    def forget(self, seq: Sequence) -> None:
        self._lags.pop(seq, None)

    def _ready(self, seq: Sequence) -> bool:
        """Whether what is known of the sequence is of the blocks that it has now."""
        lag = self._lags.get(seq)
        return (
            lag is not None and lag.preemptions == seq.num_preemptions and lag.stop == seq.num_computed_tokens
        )

    def offers(self, seqs: list[Sequence], rooms: list[int]) -> list[int]:
        left = CATCH_UP
        offers = []
        for seq, room in zip(seqs, rooms, strict=True):
            behind = self._lags[seq].stop - self._lags[seq].start if self._ready(seq) else left + 1
            offers.append(_room(self._layers.decoder, self._size, seq, room) if behind <= left else 0)
            left -= behind if offers[-1] else 0
        return offers

    def catch_up(self, seqs: list[Sequence]) -> None:
        self._catch_up(seqs, at_least=_BEHIND + 1)

    @torch.inference_mode()
    def _catch_up(self, seqs: list[Sequence], at_least: int) -> None:
        """Computes at most `CATCH_UP` tokens of those sequences that are `at_least` so far behind, in order."""
        left = CATCH_UP
        parts: list[tuple[Sequence, Pending]] = []
        for seq in seqs:
            lag = self._lags[seq]
            stop = min(lag.stop, len(self._layers.decoder.rotary))
            if left and stop - lag.start >= at_least:
                part = Pending(lag.start, min(stop, lag.start + left))
                left -= part.stop - part.start
                parts.append((seq, part))
        if parts:
            self._layers.advance([*parts], query=False)
            self._written(parts)

    def _written(self, parts: list[tuple[Sequence, Pending]]) -> None:
        """The draft's cache now holds these sequences up to their parts' ends."""
        for seq, part in parts:
            lag = self._lags[seq]
            for block in seq.block_table[lag.start // self._size : part.stop // self._size]:
                self._whole[block] = True
            lag.start = part.stop

    @torch.inference_mode()
    def draft(self, seqs: list[Sequence], counts: list[int], judge: Judge) -> list[list[int]]:
        parts = [(seq, Pending(self._lags[seq].start, self._lags[seq].stop)) for seq in seqs]
        drafts = run_chain(_DecoderChain(self._layers, self.token_ids, parts), seqs, counts, judge)
        self._written(parts)
        return drafts
