"""A step's integers as one buffer: one transfer to the device, then views.

Real numbers (temperatures, penalties) travel in the same int64 buffer by their bits. What only
steers loops stays on the host and is never read back.

    plan ──pack──► PackedStep(buffer, places) ──upload──► one int64 tensor ──StepTensors──► views
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.batch import DecodeBatch, PrefillBatch
from ferryman.model.inverse_cdf import Filters
from ferryman.model.sampler import UNIFORM_BITS, Penalties, uniform_bits
from ferryman.schedule.batch import DecodeStep, Draw, Ints, PrefillStep, SlotOps, StepPlan

Numbers = Mapping[str, Ints]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All integers of a step behind one another; `places` says where each array lies."""

    buffer: Ints
    places: Mapping[str, tuple[int, tuple[int, ...]]]


class StepTensors:
    """The arrays of a packed step as views of the one tensor that reached the device."""

    def __init__(self, packed: PackedStep, uploaded: Tensor) -> None:
        self._places = packed.places
        self._uploaded = uploaded

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Tensor:
        begin, shape = self._places[name]
        return self._uploaded[begin : begin + prod(shape)].view(shape)

    def reals(self, name: str) -> Tensor:
        """Numbers that travelled by their bits."""
        return self[name].view(torch.float64)


def pack(plan: StepPlan) -> PackedStep:
    """Everything the device needs to know of `plan`."""
    body = _prefill(plan) if isinstance(plan, PrefillStep) else _decode(plan)
    tables = {f"pages.{kind}": table for kind, table in plan.page_tables.items()}
    return _joined({**body, **tables, **_ops(plan.ops), **_draws(plan.draws)})


def _joined(arrays: Numbers) -> PackedStep:
    places, begin = {}, 0
    for name, array in arrays.items():
        places[name] = (begin, array.shape)
        begin += array.size
    buffer = np.empty(begin, np.int64)
    for name, array in arrays.items():
        at = places[name][0]
        buffer[at : at + array.size] = array.ravel()
    return PackedStep(buffer, places)


def _prefill(plan: PrefillStep) -> Numbers:
    chunks = plan.chunks
    lens = np.array([chunk.end - chunk.start for chunk in chunks])
    ends = np.cumsum(lens)
    return {
        "token_ids": np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
        "positions": np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
        "requests": np.repeat(np.arange(len(chunks)), lens),
        "rows": np.repeat(_ints([chunk.row for chunk in chunks]), lens),
        "working_slots": _ints([chunk.working_slot for chunk in chunks]),
        "last_tokens": _ints([e - 1 for c, e in zip(chunks, ends, strict=True) for _ in c.draws]),
    }


def _decode(plan: DecodeStep) -> Numbers:
    return {
        "rows": plan.rows,
        "positions": plan.positions,
        "read_slots": plan.read_slots,
        "write_slots": plan.write_slots,
    }


def _ops(ops: SlotOps) -> Numbers:
    seeds = ops.seeds
    lens = [len(seed.token_ids) for seed in seeds]
    arrays: dict[str, Ints] = {}
    if ops.copies:
        arrays["copies"] = _ints([[c.src for c in ops.copies], [c.dst for c in ops.copies]])
    if ops.clears:
        arrays["clears"] = _ints(ops.clears)
    if ops.snapshots:
        ends = [[s.src for s in ops.snapshots], [s.dst for s in ops.snapshots]]
        arrays["snapshots"] = _ints(ends)
    if seeds:
        arrays["seed_rows"] = np.repeat(_ints([seed.row for seed in seeds]), lens)
        arrays["seed_positions"] = np.concatenate([np.arange(length) for length in lens])
        arrays["seed_token_ids"] = np.concatenate([s.token_ids for s in seeds]).astype(np.int64)
    return arrays


def _draws(draws: Sequence[Draw]) -> Numbers:
    arrays = {
        "draw_rows": _ints([draw.row for draw in draws]),
        "draw_positions": _ints([draw.position for draw in draws]),
    }
    drawn = [(i, draw) for i, draw in enumerate(draws) if not draw.params.is_greedy]
    if drawn:
        arrays |= _filters(drawn)
    if any(draw.params.has_penalties for draw in draws):
        arrays["prompt_lens"] = _ints([draw.prompt_len for draw in draws])
        arrays["penalties"] = _bits(
            [
                [draw.params.repetition_penalty for draw in draws],
                [draw.params.presence_penalty for draw in draws],
                [draw.params.frequency_penalty for draw in draws],
            ]
        )
    return arrays


def _filters(drawn: Sequence[tuple[int, Draw]]) -> Numbers:
    draws = [draw for _, draw in drawn]
    return {
        "drawn": _ints([index for index, _ in drawn]),
        "uniform_bits": _ints([uniform_bits(d.params.seed, d.position) for d in draws]),
        "top_k": _ints([draw.params.top_k for draw in draws]),
        "filters": _bits(
            [
                [draw.params.temperature for draw in draws],
                [draw.params.top_p for draw in draws],
                [draw.params.min_p for draw in draws],
            ]
        ),
    }


def _ints(values: object) -> Ints:
    return np.array(values, dtype=np.int64)


def _bits(values: object) -> Ints:
    return np.array(values, dtype=np.float64).view(np.int64)


def prefill_batch(plan: PrefillStep, tensors: StepTensors) -> PrefillBatch:
    return PrefillBatch(
        token_ids=tensors["token_ids"],
        positions=tensors["positions"],
        rows=tensors["requests"],
        spans=tuple((chunk.start, chunk.end) for chunk in plan.chunks),
        page_tables=_page_tables(plan.page_tables, tensors),
        working_slots=tensors["working_slots"],
        snapshots=tuple(
            (index, snapshot.position, snapshot.dst)
            for index, chunk in enumerate(plan.chunks)
            for snapshot in chunk.snapshots
        ),
        last_tokens=tensors["last_tokens"],
    )


def decode_batch(plan: DecodeStep, tensors: StepTensors, token_ids: Tensor) -> DecodeBatch:
    """`token_ids` [tokens] come from the device's own history, not from the plan."""
    return DecodeBatch(
        token_ids=token_ids,
        positions=tensors["positions"],
        page_tables=_page_tables(plan.page_tables, tensors),
        read_slots=tensors["read_slots"],
        write_slots=tensors["write_slots"],
        waves=plan.waves,
    )


def _page_tables(kinds: Mapping[Kind, Ints], tensors: StepTensors) -> Mapping[Kind, Tensor]:
    return {kind: tensors[f"pages.{kind}"] for kind in kinds}


def filters_of(tensors: StepTensors) -> Filters:
    """For a step with at least one draw that is not greedy."""
    temperatures, top_p, min_p = tensors.reals("filters").unbind()
    return Filters(
        indices=tensors["drawn"],
        uniforms=tensors["uniform_bits"].double() / 2.0**UNIFORM_BITS,
        temperatures=temperatures,
        top_k=tensors["top_k"],
        top_p=top_p,
        min_p=min_p,
    )


def penalties_of(tensors: StepTensors) -> Penalties:
    """For a step with at least one draw that has penalties."""
    return Penalties(*tensors.reals("penalties").unbind())
