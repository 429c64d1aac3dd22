"""The forward of a decode step, from the history to logits: kernel by kernel, or as a graph.

A graph is captured once for each size of step (`step_sizes.py`) and replayed for every step of that
size: one launch from the host instead of some hundreds. It reads its integers in a buffer of its
own, and writes into a result that all graphs share, at addresses that never change:

    upload ──body──► the graph's buffer ──replay──► token ids, logits ──► draws, kernel by kernel

A capture runs on padding alone, which reads and writes no state, so it may happen at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ferryman.engine.forward.step_tensors import DecodeTensors, StepPadding
from ferryman.model.shapes.batch import DecodeBatch
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.schedule.step_sizes import PADDING, DecodeSize

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """All tokens of a step as they were consumed [tokens], and the logits after each."""

    token_ids: Tensor
    logits: Tensor


class DecodeForward(Protocol):
    """Runs the forward of a decode step; the result is valid until the next one is queued."""

    def run(self, tensors: DecodeTensors) -> Forwarded: ...


class DecodingModel(Protocol):
    """The part of a model that a decode step calls."""

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor: ...


class Drafter(Protocol):
    """Names the tokens after the first wave of a decode step."""

    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        """All token ids of the batch [tokens]."""
        ...


@dataclass(frozen=True, slots=True)
class EagerForward:
    """Launches kernel by kernel. Padding finds token 0 in the last row of `history`. Without a
    `drafter` the plan names the drafts, or there are none."""

    model: DecodingModel
    drafter: Drafter | None
    state: ModelState
    history: Tensor
    group: Group

    def run(self, tensors: DecodeTensors) -> Forwarded:
        rows, positions, first = tensors.rows, tensors.positions, tensors.waves[0]
        token_ids = self.history[rows[:first], positions[:first]].long()
        if tensors.drafts is not None:
            token_ids = torch.cat([token_ids, tensors.drafts])
        batch = tensors.batch(token_ids)
        if self.drafter is not None:
            batch = replace(batch, token_ids=self.drafter.named(batch, self.state, self.group))
        return Forwarded(batch.token_ids, self.model.decode(batch, self.state))


class CapturedGraph(Protocol):
    """Launches, captured once."""

    def replay(self) -> None:
        """Queues them all again, on the same addresses."""
        ...


class GraphCapture(Protocol):
    """Captures what a call launches on the device."""

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """`run` has run before. Raises RuntimeError if it waits for the device."""
        ...


class CudaGraphs:
    """Graphs of the calling thread's stream; all share one pool of memory, for one runs at a
    time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with copies meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        return graph


@dataclass(frozen=True, slots=True)
class _StepGraph:
    """A captured size: its own body, and the part of the shared result that it writes."""

    body: Tensor
    graph: CapturedGraph
    forwarded: Forwarded


class GraphedForward:
    """Replays a graph for every padded step without adapters; `eager` runs the others.

    A model that cannot be captured, because a layer waits for the device, is run by `eager` from
    then on.
    """

    def __init__(self, eager: DecodeForward, capture: GraphCapture, max_tokens: int) -> None:
        """`max_tokens` of the largest step, padding included."""
        self._eager = eager
        self._capture = capture
        self._max_tokens = max_tokens
        self._graphs: dict[DecodeSize, _StepGraph] = {}
        self._shared: Forwarded | None = None
        self._is_refused = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, tensors: DecodeTensors) -> Forwarded:
        padding = tensors.padding
        if padding is None or tensors.adapters or self._is_refused:
            return self._eager.run(tensors)
        if padding.size not in self._graphs and not self._try_capture(tensors, padding):
            return self._eager.run(tensors)
        graph = self._graphs[padding.size]
        graph.body.copy_(padding.body)
        graph.graph.replay()
        return graph.forwarded

    def _try_capture(self, tensors: DecodeTensors, padding: StepPadding) -> bool:
        """Captures the size of `tensors` on padding alone; False if the model cannot be."""
        body = torch.full_like(padding.body, PADDING)
        idle = laid_on(tensors, padding.body, body)
        if idle.drafts is not None:
            idle.drafts.zero_()
        # The first run compiles kernels and allocates, which a capture must not.
        into = self._result_for(self._eager.run(idle))

        def run() -> None:
            forwarded = self._eager.run(idle)
            into.token_ids.copy_(forwarded.token_ids)
            into.logits.copy_(forwarded.logits)

        try:
            graph = self._capture.capture(run)
        except RuntimeError as error:
            log.warning("decode runs without graphs: a layer cannot be captured error=%s", error)
            self._is_refused = True
            return False
        self._graphs[padding.size] = _StepGraph(body, graph, into)
        return True

    def _result_for(self, forwarded: Forwarded) -> Forwarded:
        """The first rows of the shared result."""
        if self._shared is None:
            shape = (self._max_tokens, forwarded.logits.shape[1])
            self._shared = Forwarded(
                forwarded.token_ids.new_empty(self._max_tokens), forwarded.logits.new_empty(shape)
            )
        count = len(forwarded.token_ids)
        return Forwarded(self._shared.token_ids[:count], self._shared.logits[:count])


def laid_on(tensors: DecodeTensors, body: Tensor, other: Tensor) -> DecodeTensors:
    """The same views of `other` as `tensors` are of `body`."""

    def moved(view: Tensor) -> Tensor:
        offset = view.storage_offset() - body.storage_offset() + other.storage_offset()
        return other.as_strided(view.shape, view.stride(), offset)

    return replace(
        tensors,
        rows=moved(tensors.rows),
        positions=moved(tensors.positions),
        page_tables={kind: moved(table) for kind, table in tensors.page_tables.items()},
        read_slots=moved(tensors.read_slots),
        write_slots=moved(tensors.write_slots),
        drafts=None if tensors.drafts is None else moved(tensors.drafts),
    )
