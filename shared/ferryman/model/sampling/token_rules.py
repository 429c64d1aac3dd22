"""Biases, bans, allowed tokens and bad words on logits [draws, vocab], before penalties.

logits[i, t] += the biases of (i, t), −∞ for a ban
logits[i, t]  = −∞ for every t that a draw with allowed tokens does not allow
logits[i, t]  = −∞ for t = the last token of a bad word whose others are the last of the output
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_OUTPUT = -1


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """Numbers to add, all [biases]: of which draw, to which token, how much."""

    draws: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """`draws` [limited] have allowed tokens: those of `draws[rows[i]]` are `token_ids[i]`."""

    draws: Tensor
    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class BadWords:
    """Words of at most `longest` tokens: `draws` [words] have them, `token_ids` [words, longest]
    end in the last column, and -1 stands before them."""

    draws: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of a step; a kind that no draw has is None."""

    biases: TokenBiases | None
    allowed: AllowedTokens | None
    bad_words: BadWords | None


@dataclass(frozen=True, slots=True)
class OutputTail:
    """The last tokens before each draw [draws, longest], newest last; -1 if there is no output.

    The prompt is none: a bad word is one of the output.
    """

    token_ids: Tensor


def apply_rules(logits: Tensor, rules: LogitRules, tail: OutputTail | None) -> Tensor:
    """New logits, in float32 or the float64 that they have. `tail` is there with bad words."""
    logits = logits.clone() if logits.dtype == torch.float64 else logits.float().clone()
    if rules.biases is not None:
        _add(logits, rules.biases)
    if rules.allowed is not None:
        _allow(logits, rules.allowed)
    if rules.bad_words is not None:
        assert tail is not None, "bad words are compared with the output"
        _ban_words(logits, rules.bad_words, tail)
    return logits


def _add(logits: Tensor, biases: TokenBiases) -> None:
    """A ban may name an end token that the model has no logit for."""
    vocab = logits.shape[-1]
    values = torch.where(biases.token_ids < vocab, biases.values, 0.0).to(logits.dtype)
    places = (biases.draws, biases.token_ids.clamp_max(vocab - 1))
    logits.index_put_(places, values, accumulate=True)


def _allow(logits: Tensor, allowed: AllowedTokens) -> None:
    size = (len(allowed.draws), logits.shape[-1])
    is_allowed = torch.zeros(size, dtype=torch.bool, device=logits.device)
    is_allowed[allowed.rows, allowed.token_ids] = True
    logits[allowed.draws] = logits[allowed.draws].masked_fill(~is_allowed, -torch.inf)


def _ban_words(logits: Tensor, words: BadWords, tail: OutputTail) -> None:
    before, last = words.token_ids[:, :-1], words.token_ids[:, -1]
    longest = before.shape[1]
    output = tail.token_ids[words.draws, tail.token_ids.shape[1] - longest :]
    is_output = ((before == output) | (before < 0)).all(dim=-1)
    # Added, and not set: two words of a draw may end in one token.
    bans = torch.where(is_output, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((words.draws, last), bans, accumulate=True)
