"""The rules of a step's draws as arrays, each only if a draw has it.

bias_draws, bias_token_ids, biases                  biases, and bans as −∞
allowed_draws, allowed_rows, allowed_ids            draws with allowed tokens, and those
word_draws, word_token_ids [words, longest]         bad words, -1 before the shorter ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from ferryman.schedule.batch import Ints, SampleRequest

NONE = -1
Ruled = Sequence[tuple[int, SampleRequest]]


def pack_rules(draws: Sequence[SampleRequest]) -> Mapping[str, Ints]:
    """The arrays of the rules; none for a step without rules, as nearly every one is."""
    ruled = [(index, draw) for index, draw in enumerate(draws) if not draw.params.rules.are_none]
    if not ruled:
        return {}
    return _biases(ruled) | _allowed(ruled) | _bad_words(ruled)


def _biases(ruled: Ruled) -> dict[str, Ints]:
    biases = [
        (index, token_id, bias)
        for index, draw in ruled
        for token_id, bias in (
            *draw.params.rules.logit_bias,
            *((token_id, -inf) for token_id in sorted(draw.banned)),
        )
    ]
    if not biases:
        return {}
    indices, token_ids, values = zip(*biases, strict=True)
    return {
        "bias_draws": np.array(indices, np.int64),
        "bias_token_ids": np.array(token_ids, np.int64),
        "biases": np.array(values, np.float64).view(np.int64),
    }


def _allowed(ruled: Ruled) -> dict[str, Ints]:
    limited = [
        (index, ids) for index, draw in ruled if (ids := draw.params.rules.allowed_token_ids)
    ]
    if not limited:
        return {}
    lens = [len(ids) for _, ids in limited]
    return {
        "allowed_draws": np.array([index for index, _ in limited], np.int64),
        "allowed_rows": np.repeat(np.arange(len(limited)), lens),
        "allowed_ids": np.concatenate([np.array(ids, np.int64) for _, ids in limited]),
    }


def _bad_words(ruled: Ruled) -> dict[str, Ints]:
    words = [(index, word) for index, draw in ruled for word in draw.params.rules.bad_words]
    if not words:
        return {}
    # Two columns at least: the tensor of tokens before the last one is never empty.
    longest = max(2, *(len(word) for _, word in words))
    token_ids = np.full((len(words), longest), NONE, np.int64)
    for row, (_, word) in zip(token_ids, words, strict=True):
        row[longest - len(word) :] = word
    return {
        "word_draws": np.array([index for index, _ in words], np.int64),
        "word_token_ids": token_ids,
    }
