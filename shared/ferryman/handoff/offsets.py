"""The router's token ledger: each token of a request once and in order, from any frames.

A frame says "attempt a has these token ids from offset o on". Offsets count generated tokens from
0 and mean the same in every attempt, because a later attempt draws the same tokens.

    known      | 0 1 2 3 4 |
    frame            3 4 5 6       3 4 are duplicates, 5 6 are new
    frame                    7 8   5 6 are lacking: nothing is taken, the sender is asked

A frame ends with the running hash of all tokens up to its end: 64 bits, continued token by token,
so that it does not depend on how tokens were cut into frames. It shows that sender and client agree
on everything before the frame too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from ferryman.errors import InvalidRequest

EMPTY_HASH = 0


def extend_hash(before: int, token_ids: Iterable[int]) -> int:
    """Continues the hash of a token list: the hash of a + b follows from that of a."""
    digest = before.to_bytes(8, "little")
    for token_id in token_ids:
        digest = blake2b(digest + token_id.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """Tokens of one request in one step; `running_hash` is that of all tokens to their end."""

    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    running_hash: int

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise InvalidRequest(f"a frame cannot begin at offset {self.offset}", "offset")


@dataclass(frozen=True, slots=True)
class Accepted:
    """These tokens are new, from `offset` on."""

    offset: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """The frame had no new token: it belongs to another attempt, or all its tokens are known."""

    is_stale: bool


@dataclass(frozen=True, slots=True)
class Lacking:
    """The tokens [first, end) must come first: ask for a repetition from `first` on."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """The sender's tokens differ from those the client has: this attempt must be given up."""

    offset: int


Acceptance = Accepted | Dropped | Lacking | Diverged


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """Counts of refused input: stale and early count frames, duplicate counts tokens."""

    num_stale_frames: int
    num_early_frames: int
    num_duplicate_tokens: int
    num_diverged_frames: int


class TokenLedger:
    """The tokens of one request that the client has or will have."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._token_ids: list[int] = []
        self._hashes = [EMPTY_HASH]
        self._num_stale = 0
        self._num_early = 0
        self._num_duplicates = 0
        self._num_diverged = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def next_offset(self) -> int:
        return len(self._token_ids)

    @property
    def hash(self) -> int:
        """The running hash of all tokens so far."""
        return self._hashes[-1]

    def begin_attempt(self, attempt: int) -> None:
        """Accepts only this attempt's frames from now on. Attempt numbers only grow."""
        assert attempt > self.attempt, f"attempt {attempt} does not follow {self.attempt}"
        self.attempt = attempt

    def accept(self, frame: TokenFrame) -> Acceptance:
        """Takes the new tokens of a frame, or returns why there are none."""
        if frame.attempt != self.attempt:
            self._num_stale += 1
            return Dropped(is_stale=True)
        if frame.offset > self.next_offset:
            self._num_early += 1
            return Lacking(self.next_offset, frame.offset)
        num_known = min(self.next_offset - frame.offset, len(frame.token_ids))
        fresh = frame.token_ids[num_known:]
        hashes = self._hashes_after(frame.offset + num_known, fresh)
        if hashes[-1] != frame.running_hash or not self._knows(frame, num_known):
            self._num_diverged += 1
            return Diverged(frame.offset)
        self._num_duplicates += num_known
        if not fresh:
            return Dropped(is_stale=False)
        self._token_ids += fresh
        self._hashes += hashes[1:]
        return Accepted(frame.offset + num_known, fresh)

    def since(self, offset: int) -> Accepted:
        """All tokens from `offset` on again, for a client that resumes."""
        return Accepted(offset, tuple(self._token_ids[offset:]))

    def statistics(self) -> LedgerStatistics:
        return LedgerStatistics(
            self._num_stale, self._num_early, self._num_duplicates, self._num_diverged
        )

    def _knows(self, frame: TokenFrame, num_known: int) -> bool:
        accepted = self._token_ids[frame.offset : frame.offset + num_known]
        return accepted == list(frame.token_ids[:num_known])

    def _hashes_after(self, offset: int, token_ids: tuple[int, ...]) -> list[int]:
        hashes = [self._hashes[offset]]
        for token_id in token_ids:
            hashes.append(extend_hash(hashes[-1], (token_id,)))
        return hashes
