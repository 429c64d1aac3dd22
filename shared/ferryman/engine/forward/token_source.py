"""The tokens of a step on one rank, from its logits.

    rules → penalties → grammars → draw → logprobs

All draws go through it together. An error of one draw is that draw's: its token is a plain one, and
its error is returned with it. Each draw depends on its own row alone, and drawing changes nothing
but the places in grammars, which move to where the history ends. So if all together fail, each
can be drawn alone, and those that fail then are to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ferryman.engine.forward.draw_tensors import DrawTensors, pack_draws, unpack_draws
from ferryman.engine.forward.grammar_masks import GrammarMasks
from ferryman.engine.forward.packed_step import StepViews
from ferryman.model.sampling.sampler import (
    are_finite,
    greedy,
    greedy_if_finite,
    log_probabilities,
    penalise,
    sample,
    sample_if_finite,
)
from ferryman.model.sampling.token_rules import NO_OUTPUT, LogitRules, OutputTail, apply_rules
from ferryman.model.shapes.ranks import Group
from ferryman.schedule.batch import NO_CHOICE, NO_TOKEN
from ferryman_kernels.elementwise.token_penalties import EarlierTokens, PenaltyStrengths


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """`token_ids` [draws], NO_TOKEN for a row of logits that are not finite, NO_CHOICE at a dead
    end of a grammar; values and ids of logprobs, if any draw asks for some; and the errors of
    single draws by their index, whose tokens mean nothing."""

    token_ids: Tensor
    best: tuple[Tensor, ...] = ()
    errors: Mapping[int, Exception] = field(default_factory=dict)


class TokenSource(Protocol):
    """The tokens of a step on one rank."""

    def tokens(self, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens: ...


class Sampler:
    """Draws the tokens of a model that lies on one rank."""

    def __init__(self, masks: GrammarMasks | None = None) -> None:
        """Without `masks` no draw may have a grammar."""
        self._masks = masks

    def tokens(self, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens:
        """Raises an error of a plain draw, and one that no draw raises alone: both are the
        step's."""
        try:
            return self._drawn(logits, draws, history)
        except Exception:  # any error may be that of one draw
            plain = _plainly(logits)
            alone = [self._alone(logits, draws, index, history) for index in range(draws.count)]
            if not any(drawn.errors for drawn in alone):
                raise
        return _together(alone, plain, draws.num_best)

    def _drawn(self, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens:
        weighed = logits
        if draws.rules:
            weighed = _ruled(weighed, draws, draws.rules, history)
        if draws.penalties:
            weighed = _penalised(weighed, draws, draws.penalties, history)
        dead_ends: tuple[int, ...] = ()
        if draws.guided:
            assert self._masks is not None, "the door lets no grammar in where none is served"
            masked = self._masks.masked(weighed, draws.guided, history)
            weighed, dead_ends = masked.logits, masked.dead_ends
        if weighed is logits and not draws.num_best:
            if not draws.filters:
                return DrawnTokens(_plainly(logits))
            return DrawnTokens(sample_if_finite(logits, draws.filters, NO_TOKEN))
        drawn = sample(weighed, draws.filters) if draws.filters else greedy(weighed)
        token_ids = torch.where(are_finite(logits), drawn, NO_TOKEN)
        if dead_ends:
            token_ids[list(dead_ends)] = NO_CHOICE
        if not draws.num_best:
            return DrawnTokens(token_ids)
        logs = log_probabilities(logits, drawn, draws.num_best)
        return DrawnTokens(token_ids, (logs.values, logs.token_ids))

    def _alone(
        self, logits: Tensor, draws: DrawTensors, index: int, history: Tensor
    ) -> DrawnTokens:
        """The token of one draw, or its error."""
        logits = logits[index : index + 1]
        try:
            requests = draws.requests[index : index + 1]
            packed = pack_draws(requests)
            uploaded = torch.from_numpy(packed.buffer).to(logits.device)
            return self._drawn(logits, unpack_draws(StepViews(packed, uploaded), requests), history)
        except Exception as error:  # any error goes to the caller of the request
            return DrawnTokens(_plainly(logits), (), {0: error})


def _plainly(logits: Tensor) -> Tensor:
    """A token for each row, with no regard to its parameters. An error here is the device's."""
    return greedy_if_finite(logits, NO_TOKEN)


def _together(alone: Sequence[DrawnTokens], plain: Tensor, num_best: int) -> DrawnTokens:
    """Draws made one by one, as those of a step; every one has `num_best` alternatives, some of
    them none that it asked for."""
    errors = {index: drawn.errors[0] for index, drawn in enumerate(alone) if drawn.errors}
    token_ids = torch.cat([drawn.token_ids for drawn in alone])
    if not num_best:
        return DrawnTokens(token_ids, (), errors)
    values = torch.zeros((len(alone), 1 + num_best), dtype=torch.float64, device=plain.device)
    best_ids = plain[:, None].repeat(1, 1 + num_best)
    for index, drawn in enumerate(alone):
        if drawn.best:
            width = drawn.best[0].shape[1]
            values[index, :width], best_ids[index, :width] = (array[0] for array in drawn.best)
    return DrawnTokens(token_ids, (values, best_ids), errors)


class TokenRoom:
    """An empty tensor for the tokens that rank 0 draws."""

    def tokens(self, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens:
        return DrawnTokens(torch.empty_like(draws.rows))


class RankZeroTokens:
    """The tokens of rank 0, at every rank. Its errors stay with it: the others get a plain token in
    place of each, so all ranks write the same history."""

    def __init__(self, source: TokenSource, group: Group) -> None:
        self._source = source
        self._group = group

    def tokens(self, logits: Tensor, draws: DrawTensors, history: Tensor) -> DrawnTokens:
        # All ranks exchange here, on one line: tests can see by it that they are in step.
        drawn = self._source.tokens(logits, draws, history)
        token_ids = self._group.from_first(drawn.token_ids)
        return DrawnTokens(token_ids, drawn.best, drawn.errors)


def token_source(group: Group, masks: GrammarMasks | None) -> TokenSource:
    """The source of this rank."""
    if group.num_ranks == 1:
        return Sampler(masks)
    return RankZeroTokens(Sampler(masks) if group.rank == 0 else TokenRoom(), group)


def _ruled(logits: Tensor, draws: DrawTensors, rules: LogitRules, history: Tensor) -> Tensor:
    tail = None
    if rules.bad_words is not None:
        num_before = rules.bad_words.token_ids.shape[1] - 1
        places = draws.positions[:, None] + torch.arange(-num_before, 0, device=logits.device)
        output = history[draws.rows[:, None], places.clamp_min(0)]
        tail = OutputTail(torch.where(places >= draws.prompt_lens[:, None], output, NO_OUTPUT))
    return apply_rules(logits, rules, tail)


def _penalised(
    logits: Tensor, draws: DrawTensors, penalties: PenaltyStrengths, history: Tensor
) -> Tensor:
    tokens = history[draws.rows, : draws.longest]
    return penalise(logits, EarlierTokens(tokens, draws.prompt_lens, draws.positions), penalties)
