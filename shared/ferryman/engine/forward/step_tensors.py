"""A step's plan as arrays, and these as tensors on the device: views of the uploaded buffer.

A value is complete when it is made; a part that only some steps have is None without it.

    prefill   token_ids, positions, requests, rows [tokens]; adapters if one is used
              pages.KIND [requests, pages]; working_slots [requests]; spans [requests, 2]
              last_tokens [sampled]; scan_snapshots [snapshots, 3]; scored, if asked for
    mixed     as prefill (`mixed_chunks`); the last num_read tokens are read from the history
    tail      a prefill step of one short chunk, padded (`tail_tensors`)
    decode    rows, positions, read_slots, write_slots [tokens]; pages.KIND [tokens, pages]
              drafts [drafts] that the plan names, or place for drafts in a padded step
              waves; adapters if one is used; of a padded step kept, size, num_first
    both      the slot operations (`slot_op_tensors`) and the draws (`draw_tensors`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.draw_tensors import DrawTensors, draw_arrays, unpack_draws
from ferryman.engine.forward.mixed_chunks import as_chunks
from ferryman.engine.forward.packed_step import Arrays, PackedStep, StepViews, group, packed_step
from ferryman.engine.forward.slot_op_tensors import OpTensors, op_arrays, unpack_ops
from ferryman.engine.forward.tail_tensors import TailTensors, moved, tail_arrays, unpack_tail
from ferryman.model.sampling.prompt_logprobs import ScoredRows
from ferryman.model.shapes.batch import AdapterSegment, DecodeBatch, PrefillBatch
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    Ints,
    MixedStep,
    PrefillStep,
    PureStep,
    SampleRequest,
    StepPlan,
)
from ferryman.schedule.step_sizes import PADDING, DecodeSize, StepSizes


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """A prefill step. `rows` [tokens] is where in the history each token is written; `scored` are
    the prompts' tokens whose log probabilities are asked for, if any. The last `num_read` tokens
    come from the history, where earlier steps wrote them."""

    batch: PrefillBatch
    rows: Tensor
    ops: OpTensors
    draws: DrawTensors
    scored: ScoredRows | None = None
    num_read: int = 0

    def batch_with(self, history: Tensor) -> PrefillBatch:
        """The batch with the tokens that it reads."""
        batch, count = self.batch, self.num_read
        if not count:
            return batch
        read = history[self.rows[-count:], batch.positions[-count:]].long()
        return replace(batch, token_ids=torch.cat([batch.token_ids[:-count], read]))


@dataclass(frozen=True, slots=True)
class StepPadding:
    """A decode step padded to `size`: `kept` [tokens] are the places of its own tokens, the first
    `num_first` those of its first wave. `body` [words] holds all that its forward reads."""

    size: DecodeSize
    kept: Tensor
    num_first: int
    body: Tensor

    @property
    def drafted(self) -> Tensor:
        """The places of its drafts."""
        return self.kept[self.num_first :]


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """A decode step. Its first tokens come from the history, so its batch is made when it runs.

    `drafts` [drafts] are the tokens after its first wave, to be verified. With `padding`, tokens at
    position -1 stand between its own.
    """

    rows: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    read_slots: Tensor
    write_slots: Tensor
    waves: tuple[int, ...]
    drafts: Tensor | None
    ops: OpTensors
    draws: DrawTensors
    adapters: tuple[AdapterSegment, ...] = ()
    padding: StepPadding | None = None

    def batch(self, token_ids: Tensor) -> DecodeBatch:
        """`token_ids` [tokens]: the first wave, then the drafts."""
        return DecodeBatch(
            token_ids=token_ids,
            positions=self.positions,
            page_tables=self.page_tables,
            read_slots=self.read_slots,
            write_slots=self.write_slots,
            waves=self.waves,
            rows=torch.arange(len(self.positions), device=self.positions.device),
            adapters=self.adapters,
        )

    def idle(self) -> DecodeTensors:
        """A step of nothing but padding, of the size of this one, in memory of its own."""
        padding = self.padding
        assert padding is not None, "only a padded step has a size"
        body = torch.full_like(padding.body, PADDING)

        def on_body(view: Tensor) -> Tensor:
            return moved(view, padding.body, body)

        drafts = None if self.drafts is None else on_body(self.drafts).zero_()
        return replace(
            self,
            rows=on_body(self.rows),
            positions=on_body(self.positions),
            page_tables={kind: on_body(table) for kind, table in self.page_tables.items()},
            read_slots=on_body(self.read_slots),
            write_slots=on_body(self.write_slots),
            drafts=drafts,
            padding=replace(padding, body=body),
        )


ForwardTensors = DecodeTensors | TailTensors
"""The steps whose forward may be replayed."""

StepTensors = PrefillTensors | ForwardTensors


def pack(plan: StepPlan, sizes: StepSizes | None = None) -> PackedStep:
    """Everything that the device needs of `plan`; a decode step is padded to one of `sizes`, and
    so is one of a short chunk."""
    match plan:
        case MixedStep():
            body = _mixed(plan)
        case PrefillStep():
            body = _prompts(plan, sizes)
        case DecodeStep():
            body = _tokens(plan, sizes)
    return packed_step({**body, **op_arrays(plan.ops), **draw_arrays(plan.draws)})


def pack_scores(chunks: Sequence[Chunk]) -> PackedStep:
    """The scores that the prompts of these chunks ask for, as they are packed in a step of
    them."""
    lens = np.array([chunk.end - chunk.start for chunk in chunks])
    return packed_step(_scores(chunks, np.cumsum(lens) - lens))


def _prompts(plan: PrefillStep, sizes: StepSizes | None) -> Arrays:
    tail = sizes.tail_of(plan) if sizes else None
    return tail_arrays(plan, tail) if tail else {**_prefill(plan), **_tables(plan)}


def _mixed(plan: MixedStep) -> Arrays:
    chunks = as_chunks(plan)
    return {**_prefill(chunks), **_tables(chunks), "num_read": [len(plan.tokens.rows)]}


def _tokens(plan: DecodeStep, sizes: StepSizes | None) -> Arrays:
    arrays = {**_decode(plan), **_tables(plan)}
    return _padded(plan, arrays, sizes.of(plan)) if sizes and sizes.max_requests else arrays


def _tables(plan: PureStep) -> dict[str, Ints]:
    return {f"pages.{kind}": table for kind, table in plan.page_tables.items()}


def _prefill(plan: PrefillStep) -> Arrays:
    chunks = plan.chunks
    lens = np.array([chunk.end - chunk.start for chunk in chunks])
    ends = np.cumsum(lens)
    adapters = {"adapters": np.repeat(plan.adapters, lens)} if plan.adapters.any() else {}
    snapshots = [(i, s.position, s.dst) for i, chunk in enumerate(chunks) for s in chunk.snapshots]
    return {
        **adapters,
        "token_ids": np.concatenate([chunk.token_ids for chunk in chunks]),
        "positions": np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
        "requests": np.repeat(np.arange(len(chunks)), lens),
        "rows": np.repeat([chunk.row for chunk in chunks], lens),
        "working_slots": [chunk.working_slot for chunk in chunks],
        "last_tokens": [
            first + draw.position - 1 - chunk.start
            for chunk, first in zip(chunks, ends - lens, strict=True)
            for draw in chunk.draws
        ],
        "spans": [(chunk.start, chunk.end) for chunk in chunks],
        "scan_snapshots": np.reshape(snapshots, (-1, 3)),
        **_scores(chunks, ends - lens),
    }


def _scores(chunks: Sequence[Chunk], firsts: Ints) -> Arrays:
    """The scores of all chunks; each gets as many alternatives as the one that wants most."""
    scores = [wanted for chunk in chunks for wanted in chunk.scores]
    if not scores:
        return {}
    rows = [
        first + np.arange(len(wanted.token_ids))
        for chunk, first in zip(chunks, firsts, strict=True)
        for wanted in chunk.scores
    ]
    return group(
        "scored",
        rows=np.concatenate(rows),
        token_ids=np.concatenate([wanted.token_ids for wanted in scores]),
        num_best=[max(wanted.num_best for wanted in scores)],
    )


def _decode(plan: DecodeStep) -> dict[str, Ints]:
    drafts = {"drafts": np.array(plan.drafts, np.int64)} if plan.drafts else {}
    adapters = {"adapters": plan.adapters} if plan.adapters.any() else {}
    return {
        **drafts,
        **adapters,
        "rows": plan.rows,
        "positions": plan.positions,
        "read_slots": plan.read_slots,
        "write_slots": plan.write_slots,
        "waves": np.array(plan.verify_depths),
    }


def _padded(plan: DecodeStep, arrays: Mapping[str, Ints], size: DecodeSize) -> Arrays:
    kept = size.kept(plan.verify_depths)
    of_tokens = [name for name in arrays if name not in ("waves", "drafts", "adapters")]
    padded: dict[str, Ints] = {name: size.padded(arrays[name], kept) for name in of_tokens}
    first = plan.verify_depths[0]
    if size.waves > 1:
        drafts = np.zeros(size.num_tokens - size.requests, np.int64)
        drafts[kept[first:] - size.requests] = arrays.get("drafts", ())
        padded["drafts"] = drafts
    # The body ends here.
    padded["kept"] = kept
    padded["size"] = np.array([size.requests, size.waves, size.pages])
    padded["num_first"] = np.array([first])
    padded["waves"] = np.array([size.requests] * size.waves)
    if "adapters" in arrays:
        padded["adapters"] = size.padded(arrays["adapters"], kept).clip(0)
    return padded


def unpack(
    packed: PackedStep, uploaded: Tensor, requests: tuple[SampleRequest, ...] = ()
) -> StepTensors:
    """The step whose buffer is `uploaded`, an int64 tensor. Copies nothing. The rank that draws
    gets the `requests` of its draws."""
    views = StepViews(packed, uploaded)
    ops, draws = unpack_ops(views), unpack_draws(views, requests)
    if "tail" in views:
        return unpack_tail(views, ops, draws)
    if "spans" in views:
        num_read = views.number("num_read") if "num_read" in views else 0
        scored = _unpack_scored(views)
        return PrefillTensors(_unpack_batch(views), views["rows"], ops, draws, scored, num_read)
    return DecodeTensors(
        rows=views["rows"],
        positions=views["positions"],
        page_tables=views.by_kind("pages"),
        read_slots=views["read_slots"],
        write_slots=views["write_slots"],
        waves=tuple(views.on_host("waves").tolist()),
        drafts=views.get("drafts"),
        ops=ops,
        draws=draws,
        adapters=_unpack_adapters(views),
        padding=_unpack_padding(views),
    )


def _unpack_batch(views: StepViews) -> PrefillBatch:
    return PrefillBatch(
        token_ids=views["token_ids"],
        positions=views["positions"],
        rows=views["requests"],
        spans=tuple((start, end) for start, end in views.on_host("spans").tolist()),
        page_tables=views.by_kind("pages"),
        working_slots=views["working_slots"],
        snapshots=tuple(
            (index, position, slot)
            for index, position, slot in views.on_host("scan_snapshots").tolist()
        ),
        last_tokens=views["last_tokens"],
        adapters=_unpack_adapters(views),
    )


def _unpack_scored(views: StepViews) -> ScoredRows | None:
    if "scored.rows" not in views:
        return None
    num_best = views.number("scored.num_best")
    return ScoredRows(views["scored.rows"], views["scored.token_ids"], num_best)


def _unpack_padding(views: StepViews) -> StepPadding | None:
    if "size" not in views:
        return None
    size = DecodeSize(*views.on_host("size").tolist())
    return StepPadding(size, views["kept"], views.number("num_first"), views.before("kept"))


def _unpack_adapters(views: StepViews) -> tuple[AdapterSegment, ...]:
    """The tokens of each adapter; none of a step in which all use the model alone."""
    if "adapters" not in views:
        return ()
    # Found on the host: a search on a card would wait for it.
    used = views.on_host("adapters")
    return tuple(
        AdapterSegment(number, _uploaded(np.flatnonzero(used == number), views.device))
        for number in np.unique(used).tolist()
        if number
    )


def _uploaded(integers: Ints, device: torch.device) -> Tensor:
    """A card copies from pinned memory without a wait."""
    host = torch.from_numpy(integers)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
