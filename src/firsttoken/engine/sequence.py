"""A request while the engine works on it: its tokens, its blocks, its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from firsttoken.engine.blocks import chain_hashes, root_hash
from firsttoken.engine.request import Request, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """There are no phases: `len(token_ids) - num_computed_tokens` says what is to be computed next, be it a
    prompt, a chunk of it, one token, or all again after a preemption."""

    request: Request
    token_ids: list[int]
    """Known tokens: prompt, then output."""
    num_prompt_tokens: int
    noise_seed: int
    """The request's seed, or the one drawn for it."""
    arrival: float
    deadline: float | None = None
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in `block_table`'s blocks."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash of each full block of known tokens, as far as they have been needed."""
    num_registered_blocks: int = 0
    expected_hits: int = 0
    """While waiting: blocks that the scheduler last found cached."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache at first admission."""
    output_counts: dict[int, int] = field(default_factory=dict)
    """Output tokens by how often they stand there; kept only for requests with penalties."""
    first_scheduled: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    last_scheduled: float = 0.0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Grows chunk by chunk when `prompt_logprobs` was asked for."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_prefix_read(self) -> int:
        """Most leading tokens that may come from the prefix cache: at least one is always computed, and prompt
        logprobs need the forward pass of every prompt position not reported yet."""
        if self.request.sampling.prompt_logprobs is None:
            return len(self.token_ids) - 1
        return max(0, min(len(self.token_ids), len(self.prompt_logprobs)) - 1)

    def extend_hashes(self, block_size: int) -> list[bytes]:
        """Brings `block_hashes` up to the known tokens and returns it."""
        done = len(self.block_hashes)
        if (done + 1) * block_size <= len(self.token_ids):
            previous = self.block_hashes[-1] if done else root_hash(self.request.cache_salt)
            self.block_hashes += chain_hashes(previous, self.token_ids, done * block_size, block_size)
        return self.block_hashes
