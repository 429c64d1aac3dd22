"""Rules that make tokens likelier, or forbid them: biases, allowed ids, bad words, a least length.

All are functions of the tokens before a draw, and of nothing else. So a request that was pushed
back, moved, or drafted draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferryman.errors import InvalidRequest

MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED = 8192
MAX_BAD_WORDS = 128
MAX_WORD_TOKENS = 32


@dataclass(frozen=True, slots=True)
class TokenRules:
    """`min_tokens` are generated before one that ends the request. `logit_bias` are pairs of a
    token id and what is added to its logit. Without `allowed_token_ids` all are allowed.
    `bad_words` are lists of token ids that the output never holds.

    Raises InvalidRequest, naming the parameter, for values that mean nothing.
    """

    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if type(self.min_tokens) is not int or not 0 <= self.min_tokens < 2**31:
            raise InvalidRequest("min_tokens must be a whole number from 0 on", "min_tokens")
        _check_count(self.logit_bias, MAX_BIASES, "logit_bias")
        for token_id, bias in self.logit_bias:
            _check_id(token_id, "logit_bias")
            if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
                message = f"a bias is a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
                raise InvalidRequest(message, "logit_bias")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias has a token twice", "logit_bias")
        _check_count(self.allowed_token_ids, MAX_ALLOWED, "allowed_token_ids")
        for token_id in self.allowed_token_ids:
            _check_id(token_id, "allowed_token_ids")
        _check_count(self.bad_words, MAX_BAD_WORDS, "bad_words")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_WORD_TOKENS:
                message = f"a bad word has 1 to {MAX_WORD_TOKENS} tokens"
                raise InvalidRequest(message, "bad_words")
            for token_id in word:
                _check_id(token_id, "bad_words")

    @property
    def are_none(self) -> bool:
        return not (self.min_tokens or self.logit_bias or self.allowed_token_ids or self.bad_words)

    @property
    def banning(self) -> str:
        """The name of a rule that forbids tokens; empty when there is none."""
        names = ("min_tokens", "allowed_token_ids", "bad_words")
        return next((name for name in names if getattr(self, name)), "")

    def check_vocabulary(self, vocab: int) -> None:
        """Raises InvalidRequest for token ids beyond the `vocab` that a model has."""
        for param, token_ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_words", [token_id for word in self.bad_words for token_id in word]),
        ):
            check_vocabulary(token_ids, vocab, param)


def check_vocabulary(token_ids: Iterable[int], vocab: int, param: str) -> None:
    """Raises InvalidRequest, naming the parameter, for an id beyond the vocabulary."""
    largest = max(token_ids, default=-1)
    if largest >= vocab:
        message = f"token id {largest} is out of range: the vocabulary has {vocab}"
        raise InvalidRequest(message, param)


def _check_count(values: tuple[object, ...], most: int, param: str) -> None:
    if len(values) > most:
        raise InvalidRequest(f"{param} has at most {most} entries", param)


def _check_id(token_id: object, param: str) -> None:
    if type(token_id) is not int or not 0 <= token_id < 2**32:
        raise InvalidRequest(f"{param} must hold token ids: whole numbers from 0 on", param)


NO_RULES = TokenRules()
