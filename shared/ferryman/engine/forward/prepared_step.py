"""A step as its ranks get it, without the parts of requests that cannot be prepared.

    pack(plan)          nearly always
    each part alone     if that fails: the requests whose parts fail alone are to blame
    pack(plan again)    with plain parts in place of theirs, so that all others have their step

Nothing has run by then, on any rank. The plain parts keep the shape of the step, and their results
are void. An error that no request causes alone is the step's, and is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ferryman.engine.forward.draw_tensors import pack_draws
from ferryman.engine.forward.packed_step import PackedStep
from ferryman.engine.forward.step_tensors import pack, pack_scores
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    Ints,
    MixedStep,
    PrefillStep,
    PureStep,
    SampleRequest,
    StepPlan,
    halves_of,
)
from ferryman.schedule.prompt_scores import ScoreRequest
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.step_sizes import StepSizes

PLAIN = SamplingParams(temperature=0.0)


class UnknownAdapter(LookupError):
    """A request names an adapter that this model does not have."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """`plan` as it runs, `packed` for the device, and the errors of the requests in `failed`."""

    plan: StepPlan
    packed: PackedStep
    failed: Mapping[str, Exception]


def prepare(plan: StepPlan, sizes: StepSizes | None, num_adapters: int) -> PreparedStep:
    """Packs the plan. Raises the error of a step that no single request causes."""
    try:
        return PreparedStep(plan, _packed(plan, sizes, num_adapters), {})
    except Exception:  # any error may be that of one request
        failed = _failed(plan, num_adapters)
        if not failed:
            raise
    others = _without(plan, failed)
    return PreparedStep(others, _packed(others, sizes, num_adapters), failed)


def _packed(plan: StepPlan, sizes: StepSizes | None, num_adapters: int) -> PackedStep:
    for half in halves_of(plan):
        _check_adapters(half.adapters, num_adapters)
    return pack(plan, sizes)


def _check_adapters(adapters: Ints, num_adapters: int) -> None:
    """A number without an adapter would be answered by the model alone, and be cached so."""
    if adapters.size and int(adapters.max()) > num_adapters:
        message = f"there is no adapter {int(adapters.max())}: this model has {num_adapters}"
        raise UnknownAdapter(message)


def _failed(plan: StepPlan, num_adapters: int) -> dict[str, Exception]:
    """The requests whose part of the step cannot be prepared alone."""
    failed: dict[str, Exception] = {}
    for half in halves_of(plan):
        for index, request_id in enumerate(request_ids_of(half)):
            try:
                _prepare_part(half, index, num_adapters)
            except Exception as error:  # any error goes to the caller of the request
                failed[request_id] = error
    return failed


def _prepare_part(plan: PureStep, index: int, num_adapters: int) -> None:
    """Packs what is of one request alone: its adapter, its draws, its prompt's scores."""
    if plan.adapters.size:
        _check_adapters(plan.adapters[index : index + 1], num_adapters)
    if isinstance(plan, PrefillStep):
        chunk = plan.chunks[index]
        pack_draws(chunk.draws)
        pack_scores((chunk,))
    else:
        pack_draws([plan.draws[token] for token in plan.tokens_of(index)])


def request_ids_of(plan: PureStep) -> tuple[str, ...]:
    """The requests of a step, in its order."""
    if isinstance(plan, PrefillStep):
        return tuple(chunk.request_id for chunk in plan.chunks)
    return plan.request_ids


def _without(plan: StepPlan, failed: Mapping[str, Exception]) -> StepPlan:
    """The step with plain parts for the requests that failed."""
    match plan:
        case MixedStep():
            prompts = _prefill_without(plan.prompts, failed)
            return MixedStep(prompts, _decode_without(plan.tokens, failed))
        case PrefillStep():
            return _prefill_without(plan, failed)
        case DecodeStep():
            return _decode_without(plan, failed)


def _prefill_without(plan: PrefillStep, failed: Mapping[str, Exception]) -> PrefillStep:
    is_failed = np.array([chunk.request_id in failed for chunk in plan.chunks])
    chunks = tuple(_plain_chunk(c) if c.request_id in failed else c for c in plan.chunks)
    return replace(plan, chunks=chunks, adapters=_adapters_without(plan.adapters, is_failed))


def _decode_without(plan: DecodeStep, failed: Mapping[str, Exception]) -> DecodeStep:
    is_failed = np.zeros(len(plan.draws), np.bool_)
    for index, request_id in enumerate(plan.request_ids):
        is_failed[plan.tokens_of(index)] = request_id in failed
    draws = tuple(
        _plain_draw(draw) if is_of_failed else draw
        for draw, is_of_failed in zip(plan.draws, is_failed.tolist(), strict=True)
    )
    return replace(plan, draws=draws, adapters=_adapters_without(plan.adapters, is_failed))


def _adapters_without(adapters: Ints, is_failed: NDArray[np.bool_]) -> Ints:
    return np.where(is_failed, 0, adapters) if adapters.size else adapters


def _plain_chunk(chunk: Chunk) -> Chunk:
    draws = tuple(map(_plain_draw, chunk.draws))
    return replace(chunk, draws=draws, scores=_plain_scores(chunk.scores))


def _plain_draw(draw: SampleRequest) -> SampleRequest:
    return SampleRequest(draw.row, draw.position, draw.prompt_len, PLAIN)


def _plain_scores(scores: Sequence[ScoreRequest]) -> tuple[ScoreRequest, ...]:
    """Scores of token 0 in their place: a step returns one score for each request of one."""
    return tuple(
        ScoreRequest(wanted.first, np.zeros_like(wanted.token_ids), 0) for wanted in scores
    )
