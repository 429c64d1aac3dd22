"""The draws of a step: packed from what requests ask for, and as tensors on the device.

draws                rows, positions, prompt_lens [draws]; num_best
filters [drawn]      draws that are not greedy: their indices, random numbers, parameters
penalties [draws]    if a draw has one
biases [biases]      of which draw, to which token, how much; −∞ is a ban
allowed              the draws with allowed tokens, and those
bad_words            draws [words]; token_ids [words, longest], NO_OUTPUT before the shorter ones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from torch import Tensor

from ferryman.engine.forward.grammar_masks import GuidedDraw, guided_draws
from ferryman.engine.forward.packed_step import Arrays, PackedStep, StepViews, group, packed_step
from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.model.sampling.sampler import uniform
from ferryman.model.sampling.token_rules import (
    NO_OUTPUT,
    AllowedTokens,
    BadWords,
    LogitRules,
    TokenBiases,
)
from ferryman.schedule.batch import SampleRequest
from ferryman_kernels.elementwise.token_penalties import PenaltyStrengths

Numbered = Sequence[tuple[int, SampleRequest]]


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """The draws of a step: `rows`, `positions` and `prompt_lens` are [draws]. With `penalties` each
    draw looks back on at most `longest` tokens.

    Without `filters` every draw is greedy. `num_best` alternatives are returned with each token.
    `guided` are those under a grammar, and `requests` all draws as they were asked for: only the
    rank that draws knows either.
    """

    rows: Tensor
    positions: Tensor
    prompt_lens: Tensor
    longest: int
    num_best: int
    filters: Filters | None = None
    penalties: PenaltyStrengths | None = None
    rules: LogitRules | None = None
    guided: tuple[GuidedDraw, ...] = ()
    requests: tuple[SampleRequest, ...] = ()

    @property
    def count(self) -> int:
        return len(self.rows)


def pack_draws(draws: Sequence[SampleRequest]) -> PackedStep:
    """Draws alone, as they are packed in a step."""
    return packed_step(draw_arrays(draws))


def draw_arrays(draws: Sequence[SampleRequest]) -> Arrays:
    """The arrays of a step's draws."""
    numbered = list(enumerate(draws))
    return {
        **group(
            "draws",
            rows=[draw.row for draw in draws],
            positions=[draw.position for draw in draws],
            prompt_lens=[draw.prompt_len for draw in draws],
            num_best=[max((draw.params.logprobs for draw in draws), default=0)],
        ),
        **_filters([(i, draw) for i, draw in numbered if not draw.params.is_greedy]),
        **_penalties(draws),
        **_rules([(i, draw) for i, draw in numbered if not draw.params.rules.are_none]),
    }


def unpack_draws(views: StepViews, requests: tuple[SampleRequest, ...]) -> DrawTensors:
    """The draws among the arrays of a step. Copies nothing."""
    penalties = views.group("penalties", PenaltyStrengths)
    return DrawTensors(
        rows=views["draws.rows"],
        positions=views["draws.positions"],
        prompt_lens=views["draws.prompt_lens"],
        longest=int(views.on_host("draws.positions").max()) if penalties else 0,
        num_best=views.number("draws.num_best"),
        filters=views.group("filters", Filters),
        penalties=penalties,
        rules=_unpack_rules(views),
        guided=guided_draws(requests),
        requests=requests,
    )


def _filters(drawn: Numbered) -> Arrays:
    if not drawn:
        return {}
    params = [draw.params for _, draw in drawn]
    return group(
        "filters",
        indices=[index for index, _ in drawn],
        uniforms=[uniform(draw.params.seed, draw.position) for _, draw in drawn],
        temperatures=[of_draw.temperature for of_draw in params],
        top_k=[of_draw.top_k for of_draw in params],
        top_p=[of_draw.top_p for of_draw in params],
        min_p=[of_draw.min_p for of_draw in params],
    )


def _penalties(draws: Sequence[SampleRequest]) -> Arrays:
    params = [draw.params for draw in draws]
    if not any(of_draw.has_penalties for of_draw in params):
        return {}
    return group(
        "penalties",
        repetition=[of_draw.repetition_penalty for of_draw in params],
        presence=[of_draw.presence_penalty for of_draw in params],
        frequency=[of_draw.frequency_penalty for of_draw in params],
    )


def _rules(ruled: Numbered) -> Arrays:
    """None for a step without rules, as nearly every one is."""
    return {**_biases(ruled), **_allowed(ruled), **_bad_words(ruled)} if ruled else {}


def _biases(ruled: Numbered) -> Arrays:
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
    return group("biases", draws=indices, token_ids=token_ids, values=values)


def _allowed(ruled: Numbered) -> Arrays:
    limited = [
        (index, ids) for index, draw in ruled if (ids := draw.params.rules.allowed_token_ids)
    ]
    if not limited:
        return {}
    return group(
        "allowed",
        draws=[index for index, _ in limited],
        rows=[row for row, (_, ids) in enumerate(limited) for _ in ids],
        token_ids=[token_id for _, ids in limited for token_id in ids],
    )


def _bad_words(ruled: Numbered) -> Arrays:
    words = [(index, word) for index, draw in ruled for word in draw.params.rules.bad_words]
    if not words:
        return {}
    # Two columns at least: the tensor of tokens before the last one is never empty.
    longest = max(2, *(len(word) for _, word in words))
    token_ids = np.full((len(words), longest), NO_OUTPUT, np.int64)
    for row, (_, word) in zip(token_ids, words, strict=True):
        row[longest - len(word) :] = word
    return group("bad_words", draws=[index for index, _ in words], token_ids=token_ids)


def _unpack_rules(views: StepViews) -> LogitRules | None:
    biases = views.group("biases", TokenBiases)
    allowed = views.group("allowed", AllowedTokens)
    bad_words = views.group("bad_words", BadWords)
    if biases is None and allowed is None and bad_words is None:
        return None
    return LogitRules(biases, allowed, bad_words)
