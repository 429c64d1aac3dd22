"""Decode steps on the processor, replayed from recordings of steps of the same size.

A recording belongs to a number of requests and a width of page tables. It reads its integers in
tables of its own, into which each step's are copied:

    first steps of a size    run as ever: what they make once, such as a table, exists afterwards
    the next one             recorded while it runs
    all others               replayed

Recordings hold the tensors between the operations, so they have a budget; the least recently used
one is dropped first. A size that was dropped is recorded again after some more steps only:
if all sizes in use do not fit, recording them in turn would cost more than it saves.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.decode_forward import EagerForward, Forwarded, StepForward
from ferryman.engine.forward.recorded_launches import LaunchRecording, recorded_launches
from ferryman.engine.forward.step_tensors import DecodeTensors, ForwardTensors
from ferryman.schedule.step_sizes import PADDING, RECORDING_BYTES

log = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""The largest step that is recorded: Python takes less than a hundredth of a larger one."""

FIRST_AFTER = 4
"""Launched steps of a new size before it is recorded. A step that is recorded takes as much longer
as four to eight replays save in a model of 30 layers of 576 (bfloat16), and as twelve do where the
loops are tiny (24 layers of 48). Where requests end one after the other most sizes come once or
twice."""

AGAIN_AFTER = 32
"""Launched steps of a dropped size before it is recorded again: a recording costs as much as that
many replays save."""

LEAST_TOKENS, LEAST_PAGES = 1024, 8
"""The narrowest page tables of a recording have so many tokens, and at least so many pages. The
next ones are twice as wide. A step reads no page beyond its tokens, so a wide table costs a step
nothing that shows, and a narrow one costs four launches and a recording when the longest answer
outgrows it."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of one token each of `requests`, with page tables of up to `pages` pages."""

    requests: int
    pages: int


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recording, the integers that it reads, and the result that it writes."""

    inputs: DecodeTensors
    recording: LaunchRecording
    forwarded: Forwarded
    num_bytes: int


class ReplayedForward:
    """Replays steps of a size that was seen before; `eager` runs all others: the first ones, those
    with drafts or adapters, and those of a size whose forward cannot be recorded. Pages have
    `page_size` tokens."""

    def __init__(
        self, eager: EagerForward, page_size: int, max_bytes: int = RECORDING_BYTES
    ) -> None:
        self._eager, self._narrowest = eager, narrowest_table(page_size)
        self._max_bytes = max_bytes
        self._to_launch: dict[StepShape, int] = {}
        self.refused: dict[StepShape, str] = {}
        self._recorded: OrderedDict[StepShape, RecordedStep] = OrderedDict()

    @property
    def num_recordings(self) -> int:
        return len(self._recorded)

    def run(self, tensors: ForwardTensors) -> Forwarded:
        shape = self._shape_of(tensors) if isinstance(tensors, DecodeTensors) else None
        if not isinstance(tensors, DecodeTensors) or shape is None or shape in self.refused:
            return self._eager.run(tensors)
        if shape in self._recorded:
            return self._replay(shape, tensors)
        if left := self._to_launch.setdefault(shape, FIRST_AFTER):
            self._to_launch[shape] = left - 1
            return self._eager.run(tensors)
        return self._record(shape, tensors)

    def _shape_of(self, tensors: DecodeTensors) -> StepShape | None:
        return recorded_shape(tensors, self._narrowest)

    def _replay(self, shape: StepShape, tensors: DecodeTensors) -> Forwarded:
        self._recorded.move_to_end(shape)
        step = self._recorded[shape]
        _fill(step.inputs, tensors)
        step.recording.replay(self._eager.state.layers_run)
        return step.forwarded

    def _record(self, shape: StepShape, tensors: DecodeTensors) -> Forwarded:
        inputs = _inputs_for(shape, tensors)
        _fill(inputs, tensors)
        with recorded_launches() as recorder:
            forwarded = self._eager.run(inputs)
        if recorder.refusal:
            self._refuse(shape, recorder.refusal)
        else:
            recording = recorder.recording()
            self._keep(shape, RecordedStep(inputs, recording, forwarded, recording.num_bytes))
        return forwarded

    def _keep(self, shape: StepShape, step: RecordedStep) -> None:
        if step.num_bytes > self._max_bytes:
            self._refuse(shape, f"its tensors take {step.num_bytes} bytes")
            return
        self._recorded[shape] = step
        while sum(recorded.num_bytes for recorded in self._recorded.values()) > self._max_bytes:
            gone, _ = self._recorded.popitem(last=False)
            self._to_launch[gone] = AGAIN_AFTER

    def _refuse(self, shape: StepShape, reason: str) -> None:
        log.info("decode steps of %d are launched: %s", shape.requests, reason)
        self.refused[shape] = reason


@dataclass(frozen=True, slots=True)
class StepRecordings:
    """Makes the forward of a worker whose decode steps are recorded."""

    page_size: int

    def forward_of(self, eager: EagerForward) -> StepForward:
        return ReplayedForward(eager, self.page_size)


def narrowest_table(page_size: int) -> int:
    """The pages of the narrowest page tables of a recording."""
    return max(LEAST_PAGES, -(-LEAST_TOKENS // page_size))


def recorded_shape(tensors: DecodeTensors, narrowest: int) -> StepShape | None:
    """The shape of the step's recording, with tables of `narrowest` pages or twice as many, or four
    times and so on; None for a step that is not recorded."""
    if len(tensors.waves) > 1 or tensors.adapters or tensors.padding is not None:
        return None
    (requests,) = tensors.waves
    if requests > MAX_REQUESTS:
        return None
    width = max((table.shape[1] for table in tensors.page_tables.values()), default=1)
    doublings = max(0, -(-width // narrowest) - 1).bit_length()
    return StepShape(requests, narrowest << doublings)


def _inputs_for(shape: StepShape, tensors: DecodeTensors) -> DecodeTensors:
    """Room for the integers of any step of this shape."""
    tables: Mapping[Kind, Tensor] = {
        kind: table.new_empty((shape.requests, shape.pages))
        for kind, table in tensors.page_tables.items()
    }
    return replace(
        tensors,
        rows=torch.empty_like(tensors.rows),
        positions=torch.empty_like(tensors.positions),
        page_tables=tables,
        read_slots=torch.empty_like(tensors.read_slots),
        write_slots=torch.empty_like(tensors.write_slots),
    )


def _fill(inputs: DecodeTensors, tensors: DecodeTensors) -> None:
    inputs.rows.copy_(tensors.rows)
    inputs.positions.copy_(tensors.positions)
    inputs.read_slots.copy_(tensors.read_slots)
    inputs.write_slots.copy_(tensors.write_slots)
    for kind, table in tensors.page_tables.items():
        width = table.shape[1]
        inputs.page_tables[kind][:, :width].copy_(table)
        inputs.page_tables[kind][:, width:].fill_(PADDING)
