"""The place of one output in its grammar: which tokens may come next.

A place is a function of the output's tokens alone, so nothing of it is ever handed over: its user
replays the tokens. Retraction, migration and drafts that were rejected are all the same
thing here, namely other tokens than those before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ferryman.grammar.vocabulary import GrammarVocabulary

Mask = NDArray[np.uint32]
"""A bit for each token id, the lowest first [words of 32]."""
ALL = np.uint32(0xFFFFFFFF)
WORD = 32
REPLAYED_RUN = 64  # tokens


def num_words(num_tokens: int) -> int:
    """The words of a mask over so many token ids. Every mask has this size, whoever makes it."""
    return -(-num_tokens // WORD)


class MaskSizeDiffers(RuntimeError):
    """The library's mask is not one over this vocabulary."""


class GrammarMatcher:
    """Follows one output. Used by one thread at a time.

    An output is over after its first end token, and outside the grammar after a token that the
    grammar does not allow there, as a draft may be. No draw after either is kept, so no token is
    offered there: if a draw were kept after all, it would be an error and not a wrong output.
    """

    def __init__(
        self,
        start: LLMatcher,
        compiled: Callable[[], LLMatcher],
        vocabulary: GrammarVocabulary,
        lock: threading.RLock,
    ) -> None:
        """`start` and the result of `compiled` are before the first token. Copies of `start` share
        a lexer, which learns as it reads: `lock` lets one of them use it at a time."""
        self._start, self._compiled, self._lock = start, compiled, lock
        self._vocabulary = vocabulary
        with lock:
            self._matcher = start.deep_copy()
        self._consumed: list[int] = []
        self._is_inside = True
        self._masked_at, self._mask = -1, np.zeros(0, np.uint32)

    def move_to(self, token_ids: Sequence[int]) -> None:
        """Moves to the place after exactly these output tokens, from any other."""
        with self._lock:
            self._move_to(token_ids)

    def fill(self, mask: Mask) -> bool:
        """Writes which tokens may come next; False if there is none, not even an end. Then the
        mask is full, so that the caller's arithmetic stays finite.

        The output may end exactly where the grammar may: all end tokens of the model stand for the
        end. `mask` may be longer than the vocabulary: its bits beyond are left clear. Raises
        MaskSizeDiffers.
        """
        mask[:] = ALL
        if not self._is_inside:
            return False
        with self._lock:
            allowed = self._allowed()
        if self._matcher.is_error() or not allowed.any():
            return False
        self._masked_at, self._mask = len(self._consumed), allowed
        mask[: len(allowed)], mask[len(allowed) :] = allowed, 0
        ends = self._vocabulary.eos_token_ids
        if any(_is_set(allowed, token_id) for token_id in ends):
            for token_id in ends:
                mask[token_id // WORD] |= _bit(token_id)
        return True

    def forced(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that must follow these output tokens, as far as they are certain.

        Empty if there is a choice, and while another thread uses the grammar: a caller on an
        event loop does not wait for masks.
        """
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            self._move_to(token_ids)
            return self._matcher.compute_ff_tokens() if self._is_inside else ()
        finally:
            self._lock.release()

    def _move_to(self, token_ids: Sequence[int]) -> None:
        num_common = _num_common(self._consumed, token_ids)
        self._go_back_to(num_common)
        # The consumed tokens hold no end token, so only new ones can be one.
        new = list(token_ids[num_common:])
        ends = self._vocabulary.eos_token_ids
        inside = next((i for i, token_id in enumerate(new) if token_id in ends), len(new))
        self._consume(new[:inside])
        self._is_inside = len(self._consumed) == len(token_ids)

    def _consume(self, new: list[int]) -> None:
        """Consumes as many of `new` as the grammar takes."""
        num_taken = self._take(new, has_fuel=self._masked_at == len(self._consumed))
        if num_taken < len(new) and self._is_odd(num_taken, new[num_taken]):
            self._replay(self._compiled())
            num_taken = self._take(new, has_fuel=False)
        self._consumed += new[:num_taken]

    def _take(self, new: Sequence[int], *, has_fuel: bool) -> int:
        """Has the library consume as many of `new` as it takes; returns their number.

        Its lexer gets fuel with each mask, and the tokens after a mask share it: without masks
        between them, a long output would be refused in the middle.
        """
        num_taken, lead = 0, 1 if has_fuel else 0
        while num_taken < len(new):
            if not lead:
                self._matcher.compute_bitmask()
            run = list(new[num_taken : num_taken + (lead or REPLAYED_RUN)])
            num_here, lead = self._matcher.try_consume_tokens(run), 0
            num_taken += num_here
            if num_here < len(run):
                break
        return num_taken

    def _is_odd(self, num_taken: int, refused: int) -> bool:
        """Whether a token was refused that the mask at its place allows, or may have allowed: the
        lexer is at its limit, and the library does not always call that an error."""
        if self._matcher.is_error() or self._masked_at != len(self._consumed) + num_taken:
            return True
        return _is_set(self._mask, refused)

    def _go_back_to(self, num_tokens: int) -> None:
        """Goes back to the place after the first `num_tokens` of those consumed."""
        surplus = len(self._consumed) - num_tokens
        del self._consumed[num_tokens:]
        if surplus and not self._matcher.rollback(surplus):
            self._replay(self._start.deep_copy())

    def _replay(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._take(self._consumed, has_fuel=False)

    def _allowed(self) -> Mask:
        """The library's mask. Where a limit is exceeded, that may be the doing of other outputs of
        this grammar, for they share a lexer: alone it may go on."""
        computed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._replay(self._compiled())
            computed = self._matcher.compute_bitmask()
        return fitted(computed, len(self._vocabulary.pieces))


def fitted(computed: bytes, num_tokens: int) -> Mask:
    """The library's mask over `num_tokens` ids. It has a bit more than the vocabulary, always
    clear, so if that is a multiple of 32 it has a word more. Raises MaskSizeDiffers for any
    other size, and for a bit beyond the vocabulary."""
    words = np.frombuffer(computed, dtype=np.uint32)
    if len(words) not in (num_words(num_tokens), num_words(num_tokens + 1)):
        message = f"a mask of {len(words)} words came for a vocabulary of {num_tokens} tokens"
        raise MaskSizeDiffers(message)
    if num_tokens < WORD * len(words) and words[num_tokens // WORD] >> (num_tokens % WORD):
        raise MaskSizeDiffers(f"a mask allows an id beyond the vocabulary of {num_tokens} tokens")
    return words[: num_words(num_tokens)]


def _num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Tokens that both begin with. Mostly one begins with the other, which is found at once."""
    shorter = min(len(some), len(others))
    if list(some[:shorter]) == list(others[:shorter]):
        return shorter
    return next(i for i in range(shorter) if some[i] != others[i])


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << (token_id % WORD))


def _is_set(mask: Mask, token_id: int) -> bool:
    """False for ids beyond the mask: a draft model may name one of a padded vocabulary."""
    word = token_id // WORD
    return word < len(mask) and bool(mask[word] & _bit(token_id))
