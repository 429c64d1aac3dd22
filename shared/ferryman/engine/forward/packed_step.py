"""A step's integers as one buffer: one transfer to the device, then views.

Real numbers (temperatures, penalties) travel in the same int64 buffer by their bits. Values that
only control loops are read from the host's copy, and never read back.

    plan ──pack──► PackedStep(buffer, places) ──upload──► one int64 tensor ──unpack──► StepTensors
                       │ as_vector, from_vector
                       ▼
                   the plan vector: all that another rank needs to run the step

Every array begins at an even word: kernels for 16 aligned bytes are others than for 8, and a card
would compile both. Of a decode step with a size the arrays up to `kept` are its *body*, which lies
at the same places in every step of that size.

The vector: how many arrays; for each array its name in 16 bytes, and its one or two sides; the
buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ferryman.engine.forward.packed_rules import pack_rules
from ferryman.model.sampling.sampler import uniform_bits
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    Ints,
    PrefillStep,
    SampleRequest,
    SlotOps,
    StepPlan,
)
from ferryman.schedule.step_sizes import DecodeSize, StepSizes

Numbers = Mapping[str, Ints]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All integers of a step, one array after another; `places` gives each array's place."""

    buffer: Ints
    places: Mapping[str, tuple[int, tuple[int, ...]]]

    def array(self, name: str) -> Ints:
        begin, shape = self.places[name]
        return self.buffer[begin : begin + prod(shape)].reshape(shape)

    def as_vector(self) -> Ints:
        header = np.full((len(self.places), _HEADER_WORDS), _NO_SIDE, np.int64)
        for row, (name, (_, shape)) in zip(header, self.places.items(), strict=True):
            row[:_NAME_WORDS] = np.frombuffer(name.encode().ljust(_NAME_BYTES, b"\0"), np.int64)
            row[_NAME_WORDS : _NAME_WORDS + len(shape)] = shape
        return np.concatenate([[len(header)], header.ravel(), self.buffer])


_NAME_BYTES = 16
_NAME_WORDS = 2
_HEADER_WORDS = _NAME_WORDS + 2
_NO_SIDE = -1


def from_vector(vector: Ints) -> PackedStep:
    """Inverse of `PackedStep.as_vector`."""
    end = 1 + int(vector[0]) * _HEADER_WORDS
    places, begin = {}, 0
    for row in vector[1:end].reshape(-1, _HEADER_WORDS):
        name = row[:_NAME_WORDS].tobytes().rstrip(b"\0").decode()
        shape = tuple(side for side in row[_NAME_WORDS:].tolist() if side != _NO_SIDE)
        places[name] = (begin, shape)
        begin += _even(prod(shape))
    return PackedStep(vector[end:], places)


def pack(plan: StepPlan, sizes: StepSizes | None = None) -> PackedStep:
    """Everything that the device needs of `plan`; a decode step is padded to one of `sizes`."""
    tables = {f"pages.{kind}": table for kind, table in plan.page_tables.items()}
    body: Numbers
    if isinstance(plan, PrefillStep):
        body = {**_prefill(plan), **tables}
    elif sizes is None:
        body = {**_decode(plan), **tables}
    else:
        body = _padded(plan, {**_decode(plan), **tables}, sizes.of(plan))
    return _joined({**body, **_ops(plan.ops), **_draws(plan.draws)})


def pack_draws(draws: Sequence[SampleRequest]) -> PackedStep:
    """Draws alone, as they are packed in a step."""
    return _joined(_draws(draws))


def pack_scores(chunks: Sequence[Chunk]) -> Numbers:
    """The scores that the prompts of these chunks ask for, as they are packed in a step of
    them."""
    ends = np.cumsum([chunk.end - chunk.start for chunk in chunks])
    return _scores(chunks, ends - [chunk.end - chunk.start for chunk in chunks])


def _joined(arrays: Numbers) -> PackedStep:
    places, begin = {}, 0
    for name, array in arrays.items():
        places[name] = (begin, array.shape)
        begin += _even(array.size)
    buffer = np.zeros(begin, np.int64)
    for name, array in arrays.items():
        at = places[name][0]
        buffer[at : at + array.size] = array.ravel()
    return PackedStep(buffer, places)


def _even(words: int) -> int:
    return words + words % 2


def _prefill(plan: PrefillStep) -> Numbers:
    chunks = plan.chunks
    lens = np.array([chunk.end - chunk.start for chunk in chunks])
    ends = np.cumsum(lens)
    adapters = {"adapters": np.repeat(plan.adapters, lens)} if plan.adapters.any() else {}
    return {
        **adapters,
        "token_ids": np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
        "positions": np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks]),
        "requests": np.repeat(np.arange(len(chunks)), lens),
        "rows": np.repeat(_ints([chunk.row for chunk in chunks]), lens),
        "working_slots": _ints([chunk.working_slot for chunk in chunks]),
        "last_tokens": _ints([e - 1 for c, e in zip(chunks, ends, strict=True) for _ in c.draws]),
        "spans": _ints([(chunk.start, chunk.end) for chunk in chunks]),
        "scan_snapshots": _ints(
            [(i, s.position, s.dst) for i, chunk in enumerate(chunks) for s in chunk.snapshots]
        ).reshape(-1, 3),
        **_scores(chunks, ends - lens),
    }


def _scores(chunks: Sequence[Chunk], firsts: Ints) -> Numbers:
    """The scores of all chunks; each gets as many alternatives as the one that wants most."""
    scores = [wanted for chunk in chunks for wanted in chunk.scores]
    if not scores:
        return {}
    rows = [
        first + np.arange(len(wanted.token_ids))
        for chunk, first in zip(chunks, firsts, strict=True)
        for wanted in chunk.scores
    ]
    token_ids = np.concatenate([wanted.token_ids for wanted in scores])
    return {
        "score_rows": np.concatenate(rows),
        "score_token_ids": token_ids.astype(np.int64),
        "score_best": _ints([max(wanted.num_best for wanted in scores)]),
    }


def _decode(plan: DecodeStep) -> Numbers:
    drafts = {"drafts": _ints(plan.drafts)} if plan.drafts else {}
    adapters = {"adapters": plan.adapters} if plan.adapters.any() else {}
    return {
        **drafts,
        **adapters,
        "rows": plan.rows,
        "positions": plan.positions,
        "read_slots": plan.read_slots,
        "write_slots": plan.write_slots,
        "waves": _ints(plan.verify_depths),
    }


def _padded(plan: DecodeStep, arrays: Numbers, size: DecodeSize) -> Numbers:
    kept = size.kept(plan.verify_depths)
    of_tokens = [name for name in arrays if name not in ("waves", "drafts", "adapters")]
    padded = {name: size.padded(arrays[name], kept) for name in of_tokens}
    if size.waves > 1:
        drafts = np.zeros(size.num_tokens - size.requests, np.int64)
        first = plan.verify_depths[0]
        drafts[kept[first:] - size.requests] = arrays.get("drafts", _NO_DRAFTS)
        padded["drafts"] = drafts
    # The body ends here.
    padded["kept"] = kept
    padded["size"] = _ints([size.requests, size.waves, size.pages])
    padded["num_first"] = _ints([plan.verify_depths[0]])
    padded["waves"] = _ints([size.requests] * size.waves)
    if "adapters" in arrays:
        padded["adapters"] = size.padded(arrays["adapters"], kept).clip(0)
    return padded


_NO_DRAFTS = np.zeros(0, np.int64)


def _ops(ops: SlotOps) -> Numbers:
    seeds = ops.seeds
    lens = [len(seed.token_ids) for seed in seeds]
    arrays: dict[str, Ints] = {}
    for kind in {copy.kind: None for copy in ops.copies}:
        pairs = [(copy.src, copy.dst) for copy in ops.copies if copy.kind is kind]
        arrays[f"copies.{kind}"] = _pairs(pairs)
    if ops.clears:
        arrays["clears"] = _ints(ops.clears)
    for name, frozen in (("saves", ops.saves), ("snapshots", ops.snapshots)):
        if frozen:
            arrays[name] = _pairs([(s.src, s.dst) for s in frozen])
    if seeds:
        arrays["seed_rows"] = np.repeat(_ints([seed.row for seed in seeds]), lens)
        arrays["seed_positions"] = np.concatenate([np.arange(length) for length in lens])
        arrays["seed_token_ids"] = np.concatenate([s.token_ids for s in seeds]).astype(np.int64)
    return arrays


def _pairs(pairs: Sequence[tuple[int, int]]) -> Ints:
    """Sources, then destinations, both from an even word on: a last source of -1 is none."""
    table = np.full((2, _even(len(pairs))), -1, np.int64)
    table[:, : len(pairs)] = _ints(pairs).T
    return table


def _draws(draws: Sequence[SampleRequest]) -> Numbers:
    arrays = {
        "draw_rows": _ints([draw.row for draw in draws]),
        "draw_positions": _ints([draw.position for draw in draws]),
    }
    if num_best := max((draw.params.logprobs for draw in draws), default=0):
        arrays["num_best"] = _ints([num_best])
    rules = pack_rules(draws)
    if rules:
        arrays |= rules
    if "word_draws" in rules or any(draw.params.has_penalties for draw in draws):
        arrays["prompt_lens"] = _ints([draw.prompt_len for draw in draws])
    drawn = [(i, draw) for i, draw in enumerate(draws) if not draw.params.is_greedy]
    if drawn:
        arrays |= _filters(drawn)
    if any(draw.params.has_penalties for draw in draws):
        arrays["penalties"] = _bits(
            [
                [draw.params.repetition_penalty for draw in draws],
                [draw.params.presence_penalty for draw in draws],
                [draw.params.frequency_penalty for draw in draws],
            ]
        )
    return arrays


def _filters(drawn: Sequence[tuple[int, SampleRequest]]) -> Numbers:
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
