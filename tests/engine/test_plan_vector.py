"""The plan vector holds all of a step: ranks that get nothing else keep the state of the first.

The ranks run as threads in lockstep, so a call that not all of them make at the same place fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.engine.plans import Guest, decode, full_pages, prefill, with_snapshots
from tests.engine.toy_model import SIZES, ToyModel
from tests.lockstep import Lockstep, LockstepGroup

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind
from ferryman.engine.forward.packed_step import PackedStep, from_vector, packed_step
from ferryman.engine.forward.step import StepRunner
from ferryman.engine.forward.step_tensors import pack, unpack
from ferryman.engine.memory.slabs import Slabs
from ferryman.schedule.batch import RowSeed, SlotCopy, SlotOps, SlotSnapshot, StepPlan
from ferryman.schedule.request import SamplingParams

DRAWN = SamplingParams(temperature=0.9, top_p=0.8, seed=5, repetition_penalty=1.2, logprobs=2)
ANNA = Guest("anna", [3, 1, 4, 1, 5, 9, 2, 6, 5], 0, 2, full_pages(7, 3, 5), DRAWN)
BERT = Guest("bert", [2, 7, 1, 8, 2], 3, 6, full_pages(1, 9))
CARL = Guest("carl", ANNA.tokens, 1, 0, full_pages(7, 3, 8))

STEPS: list[StepPlan] = [
    with_snapshots(prefill(0, [(ANNA, 0, 8), (BERT, 0, 5)], SlotOps(clears=(2, 6))), (8, 4)),
    prefill(1, [(ANNA, 8, 9)]),
    decode(2, [(BERT, 5), (ANNA, 9)], SlotOps(snapshots=(SlotSnapshot(2, 3, 10),))),
    prefill(
        3,
        [(CARL, 8, 9)],
        SlotOps(
            copies=(SlotCopy(4, 0), SlotCopy(9, 8, Kind.FULL), SlotCopy(2, 1, Kind.FULL)),
            seeds=(RowSeed(1, as_token_ids(ANNA.tokens[:8])),),
        ),
    ),
    decode(4, [(CARL, 9), (ANNA, 10), (BERT, 6)]),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step.step_id))
def test_a_step_comes_back_from_its_vector(step: StepPlan) -> None:
    packed = pack(step)
    again = from_vector(packed.as_vector())
    assert list(again.places) == list(packed.places)
    for name in packed.places:
        assert np.array_equal(again.array(name), packed.array(name)), name
        assert again.array(name).shape == packed.array(name).shape, name


def test_a_real_number_is_never_cut_to_a_whole_one() -> None:
    packed = packed_step({"filters.top_p": [0.7], "rows": [3]})
    assert packed.array("filters.top_p").view(np.float64).tolist() == [0.7]
    with pytest.raises(AssertionError, match="its numbers belong in REALS"):
        packed_step({"filters.top_n": [0.7]})


def test_steps_without_draws_or_with_several_waves_come_back_too() -> None:
    first = prefill(0, [(ANNA, 0, 4)])
    assert from_vector(pack(first).as_vector()).array("draws.rows").shape == (0,)
    step = decode(1, [(ANNA, 9), (BERT, 5)])
    waves = replace(step, verify_depths=(1, 1))
    assert from_vector(pack(waves).as_vector()).array("waves").tolist() == [1, 1]


@dataclass(frozen=True, slots=True)
class VectorRun:
    """The tokens that a rank drew or received, and the content of its slots."""

    tokens: list[list[int]]
    slots: list[bytes]


def ran(group: LockstepGroup, steps: list[PackedStep]) -> VectorRun:
    """Runs a rank that is given the packed vectors only."""
    model = ToyModel()
    slabs = Slabs.allocate(model.manifest, SIZES, "cpu")
    runner = StepRunner(model, slabs, group, max_rows=4, max_len=64)
    tokens = [
        arrays[0].tolist()
        for step in steps
        if (arrays := runner.run(unpack(step, torch.from_numpy(step.buffer))).arrays)
    ]
    return VectorRun(tokens, [slab.numpy().tobytes() for slab in slabs.tensors.values()])


def test_ranks_that_get_vectors_alone_draw_the_same_and_keep_the_same() -> None:
    steps = [from_vector(pack(step).as_vector()) for step in STEPS]
    lockstep = Lockstep(3)
    first, *ranks = lockstep.run(lambda group: ran(group, steps))
    assert [len(tokens) for tokens in first.tokens] == [1, 1, 2, 1, 3]
    assert all(other == first for other in ranks)
    assert [call.operation for call in lockstep.calls] == ["tell"] * len(STEPS)
