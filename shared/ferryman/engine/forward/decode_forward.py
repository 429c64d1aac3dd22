"""The forward of a step, from its tokens to logits: kernel by kernel, or as a graph.

Graphs are of decode steps and of a prompt's short chunk. A graph is captured once for each size
(`step_sizes.py`) and replayed for every step of that size: one launch from the host instead of some
hundreds. It reads its integers in a buffer of its own, and writes into a result that all graphs
share, at addresses that never change:

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

from ferryman.engine.forward.step_tensors import DecodeTensors, ForwardTensors
from ferryman.engine.forward.tail_tensors import TailTensors
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.schedule.step_sizes import DecodeSize, TailSize

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """All tokens of a decode step as they were consumed [tokens], and the logits after each; of a
    chunk no tokens, which the plan names, and the logits after its last."""

    token_ids: Tensor
    logits: Tensor


class StepForward(Protocol):
    """Runs the forward of a step; the result is valid until the next one is queued."""

    def run(self, tensors: ForwardTensors) -> Forwarded: ...


class ForwardedModel(Protocol):
    """The part of a model that a step calls."""

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows: ...

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

    model: ForwardedModel
    drafter: Drafter | None
    state: ModelState
    history: Tensor
    group: Group

    def run(self, tensors: ForwardTensors) -> Forwarded:
        return self._chunk(tensors) if isinstance(tensors, TailTensors) else self._decode(tensors)

    def _chunk(self, tensors: TailTensors) -> Forwarded:
        batch = tensors.batch()
        prefilled = self.model.prefill(batch, self.state.by_token)
        return Forwarded(batch.token_ids[:0], prefilled.logits(batch.last_tokens))

    def _decode(self, tensors: DecodeTensors) -> Forwarded:
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

    def __init__(self, eager: StepForward, capture: GraphCapture, max_tokens: int) -> None:
        """`max_tokens` of the largest decode step, padding included."""
        self._eager = eager
        self._capture = capture
        self._max_tokens = max_tokens
        self._graphs: dict[DecodeSize | TailSize, _StepGraph] = {}
        self._shared: Forwarded | None = None
        self._is_refused = False

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, tensors: ForwardTensors) -> Forwarded:
        padding = tensors.padding
        if padding is None or self._is_refused or _has_adapters(tensors):
            return self._eager.run(tensors)
        if padding.size not in self._graphs and not self._try_capture(tensors):
            return self._eager.run(tensors)
        graph = self._graphs[padding.size]
        graph.body.copy_(padding.body)
        graph.graph.replay()
        return graph.forwarded

    def _try_capture(self, tensors: ForwardTensors) -> bool:
        """Captures the size of `tensors` on padding alone; False if the model cannot be."""
        idle = tensors.idle()
        assert idle.padding is not None, "a padded step is padded"
        # The first run compiles kernels and allocates, which a capture must not.
        into = self._result_for(self._eager.run(idle))

        def run() -> None:
            forwarded = self._eager.run(idle)
            into.token_ids.copy_(forwarded.token_ids)
            into.logits.copy_(forwarded.logits)

        try:
            graph = self._capture.capture(run)
        except RuntimeError as error:
            log.warning("steps run without graphs: a layer cannot be captured error=%s", error)
            self._is_refused = True
            return False
        self._graphs[idle.padding.size] = _StepGraph(idle.padding.body, graph, into)
        return True

    def _result_for(self, forwarded: Forwarded) -> Forwarded:
        """The first rows of the shared result."""
        if self._shared is None:
            shape = (self._max_tokens, forwarded.logits.shape[1])
            self._shared = Forwarded(
                forwarded.token_ids.new_empty(self._max_tokens), forwarded.logits.new_empty(shape)
            )
        tokens, rows = len(forwarded.token_ids), len(forwarded.logits)
        return Forwarded(self._shared.token_ids[:tokens], self._shared.logits[:rows])


def _has_adapters(tensors: ForwardTensors) -> bool:
    return isinstance(tensors, DecodeTensors) and bool(tensors.adapters)
