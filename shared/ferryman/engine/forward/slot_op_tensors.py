"""The slot operations of a step: packed from its plan, and as tensors on the device.

copies.KIND, saves, snapshots    src, dst [pairs]
clears                           [slots]
seeds                            rows, positions, token_ids [tokens]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.packed_step import Arrays, StepViews, group
from ferryman.schedule.batch import SlotCopy, SlotOps, SlotSnapshot


@dataclass(frozen=True, slots=True)
class SlotPairs:
    """Slots of one kind to copy: `src` and `dst` are [copies]."""

    src: Tensor
    dst: Tensor


@dataclass(frozen=True, slots=True)
class Seeds:
    """The first tokens of a row's history: `rows`, `positions` and `token_ids` are [tokens]."""

    rows: Tensor
    positions: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class OpTensors:
    """The slot operations of a step: copies, clears, seeds and saves before it, snapshots after.
    `copies` are by kind; all others are of recurrent slots."""

    copies: Mapping[Kind, SlotPairs]
    clears: Tensor | None
    seeds: Seeds | None
    saves: SlotPairs | None
    snapshots: SlotPairs | None


def op_arrays(ops: SlotOps) -> Arrays:
    """The arrays of a step's slot operations; loads are no part of them."""
    arrays: dict[str, ArrayLike] = {}
    for kind in {copy.kind: None for copy in ops.copies}:
        of_kind = [copy for copy in ops.copies if copy.kind is kind]
        arrays |= _pairs(f"copies.{kind}", of_kind)
    arrays |= {**_pairs("saves", ops.saves), **_pairs("snapshots", ops.snapshots)}
    if ops.clears:
        arrays["clears"] = ops.clears
    if ops.seeds:
        lens = [len(seed.token_ids) for seed in ops.seeds]
        arrays |= group(
            "seeds",
            rows=np.repeat([seed.row for seed in ops.seeds], lens),
            positions=np.concatenate([np.arange(length) for length in lens]),
            token_ids=np.concatenate([seed.token_ids for seed in ops.seeds]),
        )
    return arrays


def _pairs(name: str, pairs: Sequence[SlotCopy] | Sequence[SlotSnapshot]) -> Arrays:
    if not pairs:
        return {}
    return group(name, src=[pair.src for pair in pairs], dst=[pair.dst for pair in pairs])


def unpack_ops(views: StepViews) -> OpTensors:
    """The slot operations among the arrays of a step. Copies nothing."""
    copies = {kind: views.group(f"copies.{kind}", SlotPairs) for kind in Kind}
    return OpTensors(
        copies={kind: pairs for kind, pairs in copies.items() if pairs is not None},
        clears=views.get("clears"),
        seeds=views.group("seeds", Seeds),
        saves=views.group("saves", SlotPairs),
        snapshots=views.group("snapshots", SlotPairs),
    )
