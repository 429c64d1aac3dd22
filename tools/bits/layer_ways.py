"""The ways of the table, driven layer by layer on the model itself, without an engine.

Each computes the positions of one prompt and of its answer, whose tokens the cold run has chosen;
a recorder notes what parts and kernels give for them. Other sequences are in the step, or were,
as the way has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tests.model.paged_run import NO_SLOT, Lane, PagedRun, Part
from tools.bits.layer_record import LayerRecorder
from tools.bits.models import PAGE_SIZE, Prompt
from tools.bits.ways import companions, donor, hit_depth
from torch import Tensor

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.model.layers.decoder import Model
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.state import ModelState
from ferryman_kernels.ragged import on_host

NUM_DRAFTS = 4
CHUNK_TOKENS = 1_024
COMPANION_LEN = 32
"""Tokens of each other prompt of a batch: the pool of a `PagedRun` is small."""


@dataclass(frozen=True, slots=True)
class EndRows:
    """Logits of the last token of each chunk, as an engine makes them; the other rows are NaN."""

    ends: Tensor
    values: Tensor
    num_rows: int

    def logits(self, rows: Tensor) -> Tensor:
        whole = self.values.new_full((self.num_rows, self.values.shape[1]), torch.nan)
        whole[self.ends] = self.values
        return whole[rows]


@dataclass(frozen=True, slots=True)
class EndsModel:
    """A model whose prefill runs the head over the ends of chunks alone."""

    inner: Model
    layers: LayerRecorder

    @property
    def manifest(self) -> StateManifest:
        return self.inner.manifest

    def prefill(self, batch: PrefillBatch, state: ModelState) -> EndRows:
        prefilled = self.inner.prefill(batch, state)
        ends = torch.tensor([end - start for start, end in on_host(batch.spans)]).cumsum(0) - 1
        with self.layers.ends(ends.tolist()):
            values = prefilled.logits(ends)
        return EndRows(ends, values, len(batch.token_ids))

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        return self.inner.decode(batch, state)


class TracedRun:
    """A model with state of its own, whose `lane` is recorded."""

    def __init__(self, model: Model, layers: LayerRecorder) -> None:
        self.run = PagedRun(EndsModel(model, layers))  # type: ignore[arg-type]
        self.layers = layers
        layers.state_memory = {
            slab.untyped_storage().data_ptr() for slab in self.run.slabs.tensors.values()
        }
        self.lane = self.run.start()

    def prefill(
        self,
        token_ids: Sequence[int],
        *,
        others: Sequence[Part] = (),
        snapshots: Mapping[int, int] | None = None,
    ) -> Tensor:
        """The logits after the last token; other parts come first in the step."""
        before, start = sum(len(part.token_ids) for part in others), self.lane.position
        positions = {before + index: start + index for index in range(len(token_ids))}
        with self.layers.step(before + len(token_ids), positions):
            logits = self.run.prefill([*others, Part(self.lane, token_ids, dict(snapshots or {}))])
        return logits[-1][-1]

    def decode(self, token_id: int, *, others: Sequence[Lane] = ()) -> Tensor:
        """The same for one token of the answer; each other sequence takes it, too."""
        lanes = [*others, self.lane]
        with self.layers.step(len(lanes), {len(others): self.lane.position}):
            logits = self.run.decode(lanes, [token_id] * len(lanes))
        return logits[-1]

    def verify(self, token_ids: Sequence[int]) -> None:
        """Several tokens of the answer at once, all of which are accepted."""
        start, count = self.lane.position, len(token_ids)
        with self.layers.step(count, {index: start + index for index in range(count)}):
            self.run.verify([self.lane], [token_ids])
        self.run.keep(self.lane, count, count)

    def resume(self, position: int, snapshot: int) -> None:
        """The lane begins anew at an earlier position of itself."""
        self.lane = self.run.resume(snapshot, self.lane, position)

    def snapshot_slot(self) -> int:
        """A free recurrent slot; NO_SLOT for a model without."""
        return self.run.free_slots.pop() if Kind.RECURRENT in self.run.slabs.by_kind else NO_SLOT

    def snapshot(self) -> int:
        """A copy of the recurrent state as it is now."""
        slot = self.snapshot_slot()
        if slot != NO_SLOT:
            slab = self.run.slabs.by_kind[Kind.RECURRENT].tensor
            slab[slot] = slab[self.lane.working_slot]
        return slot


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt, and an answer that follows it."""

    prompt: Prompt
    answer: Prompt


def cold(traced: TracedRun, prompt: Prompt, num_tokens: int) -> Prompt:
    """The cold run, which chooses the answer."""
    answer = [int(traced.prefill(prompt).argmax())]
    while len(answer) < num_tokens:
        answer.append(int(traced.decode(answer[-1]).argmax()))
    return tuple(answer)


def _answered(traced: TracedRun, answer: Sequence[int]) -> None:
    """The last token of an answer is drawn and never consumed."""
    for token_id in answer[:-1]:
        traced.decode(token_id)


def chunked(size: int, traced: TracedRun, asked: TracedPrompt) -> None:
    for start in range(0, len(asked.prompt), size):
        traced.prefill(asked.prompt[start : start + size])
    _answered(traced, asked.answer)


def hit(depth: str, traced: TracedRun, asked: TracedPrompt) -> None:
    position = hit_depth(depth, len(asked.prompt))
    slot = traced.snapshot_slot()
    snapshots = {} if slot == NO_SLOT else {position: slot}
    traced.prefill(donor(asked.prompt, position), snapshots=snapshots)
    traced.resume(position, slot)
    traced.prefill(asked.prompt[position:])
    _answered(traced, asked.answer)


def batched(size: int, traced: TracedRun, asked: TracedPrompt) -> None:
    """Others are prefilled in the same step as far as it holds them, else before."""
    others = [traced.run.start() for _ in range(size - 1)]
    parts = [
        Part(lane, other[:COMPANION_LEN])
        for lane, other in zip(others, companions((asked.prompt,), size - 1), strict=True)
    ]
    fitting = (CHUNK_TOKENS - len(asked.prompt)) // COMPANION_LEN
    if parts[fitting:]:
        traced.run.prefill(parts[fitting:])
    traced.prefill(asked.prompt, others=parts[:fitting])
    for token_id in asked.answer[:-1]:
        traced.decode(token_id, others=others)


def drafted(traced: TracedRun, asked: TracedPrompt) -> None:
    traced.prefill(asked.prompt)
    consumed = asked.answer[:-1]
    for start in range(0, len(consumed), 1 + NUM_DRAFTS):
        traced.verify(consumed[start : start + 1 + NUM_DRAFTS])


def _decoded_to_page_end(traced: TracedRun, asked: TracedPrompt) -> int:
    """Answers, and returns the last page end with the lane resumed there."""
    traced.prefill(asked.prompt)
    end = (len(asked.prompt) + len(asked.answer) - 1) // PAGE_SIZE * PAGE_SIZE
    assert end > len(asked.prompt), "the answer is to reach a page end"
    for token_id in asked.answer[: end - len(asked.prompt)]:
        traced.decode(token_id)
    traced.resume(end, traced.snapshot())
    return end


def retracted(traced: TracedRun, asked: TracedPrompt) -> None:
    """Drawn tokens after the last page end are computed again as a prompt."""
    end = _decoded_to_page_end(traced, asked)
    again = asked.answer[end - len(asked.prompt) : -1]
    if again:
        traced.prefill(again)


def next_turn(first: TracedPrompt, traced: TracedRun, asked: TracedPrompt) -> None:
    """`asked` begins with the prompt and the answer of the first turn."""
    end = _decoded_to_page_end(traced, first)
    traced.prefill(asked.prompt[end:])
    _answered(traced, asked.answer)


def on_threads(number: int, traced: TracedRun, asked: TracedPrompt) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        traced.prefill(asked.prompt)
        _answered(traced, asked.answer)
    finally:
        torch.set_num_threads(before)


LayerWay = Callable[[TracedRun, TracedPrompt], None]
LAYER_WAYS: Mapping[str, LayerWay] = {
    **{f"chunks-{size}": partial(chunked, size) for size in (16, 32, 48, 37)},
    **{f"hit-{depth}": partial(hit, depth) for depth in ("first", "middle", "last")},
    "host": partial(hit, "last"),
    **{f"batch-{size}": partial(batched, size) for size in (6, 24, 48)},
    **dict.fromkeys(("drafts-lookup", "drafts-model", "drafts-layer"), drafted),
    **dict.fromkeys(("retracted", "retracted-host"), retracted),
    **{f"threads-{number}": partial(on_threads, number) for number in (2, 3)},
}
"""By the names of the table. "turn-2" needs the first turn as well: see `next_turn`."""
