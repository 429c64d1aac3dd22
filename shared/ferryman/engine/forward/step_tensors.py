"""A packed step as tensors on the device: views of the one buffer that was uploaded.

A value is complete when it is made; a part that only some steps have (`Drafts`, `Seeds`,
`PastPenalties`, the filters of sampled draws) is a value of its own, or None. Values that only
control loops are read from the host's copy, and never read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.grammar_masks import GuidedDraw, guided_draws
from ferryman.engine.forward.packed_step import PackedStep
from ferryman.model.sampling.inverse_cdf import Filters
from ferryman.model.sampling.prompt_logprobs import ScoredRows
from ferryman.model.sampling.sampler import UNIFORM_BITS, Penalties
from ferryman.model.sampling.token_rules import AllowedTokens, BadWords, LogitRules, TokenBiases
from ferryman.model.shapes.batch import AdapterSegment, DecodeBatch, PrefillBatch
from ferryman.schedule.batch import Ints, SampleRequest
from ferryman.schedule.step_sizes import DecodeSize


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


@dataclass(frozen=True, slots=True)
class PastPenalties:
    """For a step in which at least one draw has penalties. `prompt_lens` is [draws]; every draw
    looks back on at most `longest` tokens."""

    penalties: Penalties
    prompt_lens: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class RuleTensors:
    """For a step in which at least one draw has rules. Where one has bad words, `prompt_lens` is
    [draws], and each draw looks back on the `num_before` tokens of output before it."""

    rules: LogitRules
    prompt_lens: Tensor | None
    num_before: int


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """The draws of a step: `rows` and `positions` [draws]; `count` is their number.

    Without `filters` every draw is greedy. `num_best` alternatives are returned with each token.
    `guided` are those under a grammar, and `requests` all draws as they were asked for: only the
    rank that draws knows either.
    """

    count: int
    rows: Tensor
    positions: Tensor
    num_best: int
    filters: Filters | None
    past: PastPenalties | None
    guided: tuple[GuidedDraw, ...] = ()
    rules: RuleTensors | None = None
    requests: tuple[SampleRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillTensors:
    """A prefill step. `rows` [tokens] is where in the history each token is written; `scored` are
    the prompts' tokens whose log probabilities are asked for, if any."""

    batch: PrefillBatch
    rows: Tensor
    ops: OpTensors
    draws: DrawTensors
    scored: ScoredRows | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens of a decode step after its first wave [drafts], to be verified."""

    token_ids: Tensor


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

    With `padding`, tokens at position -1 stand between its own.
    """

    rows: Tensor
    positions: Tensor
    page_tables: Mapping[Kind, Tensor]
    read_slots: Tensor
    write_slots: Tensor
    waves: tuple[int, ...]
    drafts: Drafts | None
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
            adapters=self.adapters,
        )


StepTensors = PrefillTensors | DecodeTensors


def unpack(
    packed: PackedStep, uploaded: Tensor, requests: tuple[SampleRequest, ...] = ()
) -> StepTensors:
    """The step whose buffer is `uploaded`, an int64 tensor. Copies nothing. The rank that draws
    gets the `requests` of its draws."""
    views = _Views(packed, uploaded)
    draws = _draws(views, requests)
    if "spans" in packed.places:
        batch, scored = _prefill_batch(views), _scored(views)
        return PrefillTensors(batch, views["rows"], _ops(views), draws, scored)
    return DecodeTensors(
        rows=views["rows"],
        positions=views["positions"],
        page_tables=views.page_tables(),
        read_slots=views["read_slots"],
        write_slots=views["write_slots"],
        waves=tuple(views.on_host("waves").tolist()),
        drafts=Drafts(views["drafts"]) if "drafts" in packed.places else None,
        ops=_ops(views),
        draws=draws,
        adapters=views.segments(),
        padding=views.padding(),
    )


def unpack_draws(
    packed: PackedStep, uploaded: Tensor, requests: tuple[SampleRequest, ...]
) -> DrawTensors:
    """Draws that were packed alone."""
    return _draws(_Views(packed, uploaded), requests)


class _Views:
    """Arrays by name, on the device or on the host."""

    def __init__(self, packed: PackedStep, uploaded: Tensor) -> None:
        self._packed, self._uploaded = packed, uploaded

    def __contains__(self, name: str) -> bool:
        return name in self._packed.places

    def __getitem__(self, name: str) -> Tensor:
        begin, shape = self._packed.places[name]
        return self._uploaded[begin : begin + prod(shape)].view(shape)

    def on_host(self, name: str) -> Ints:
        return self._packed.array(name)

    def reals(self, name: str) -> tuple[Tensor, ...]:
        """Rows of numbers that travelled by their bits."""
        return self[name].view(torch.float64).unbind()

    def pairs(self, name: str) -> SlotPairs | None:
        if name not in self:
            return None
        sources = self.on_host(name)[0]
        count = len(sources) - int(sources[-1] < 0)
        return SlotPairs(*self[name][:, :count].unbind())

    def pairs_by_kind(self, name: str) -> Mapping[Kind, SlotPairs]:
        by_kind = {kind: self.pairs(f"{name}.{kind}") for kind in Kind}
        return {kind: pairs for kind, pairs in by_kind.items() if pairs is not None}

    def padding(self) -> StepPadding | None:
        if "size" not in self:
            return None
        end, _ = self._packed.places["kept"]
        size = DecodeSize(*self.on_host("size").tolist())
        num_first = int(self.on_host("num_first")[0])
        return StepPadding(size, self["kept"], num_first, self._uploaded[:end])

    def segments(self) -> tuple[AdapterSegment, ...]:
        """The tokens of each adapter; none of a step in which all use the model alone."""
        if "adapters" not in self:
            return ()
        # Found on the host: a search on a card would wait for it.
        used, device = self.on_host("adapters"), self._uploaded.device
        return tuple(
            AdapterSegment(number, _uploaded(np.flatnonzero(used == number), device))
            for number in np.unique(used).tolist()
            if number
        )

    def page_tables(self) -> Mapping[Kind, Tensor]:
        names = {kind: f"pages.{kind}" for kind in Kind}
        return {kind: self[name] for kind, name in names.items() if name in self}


def _uploaded(integers: Ints, device: torch.device) -> Tensor:
    """A card copies from pinned memory without a wait."""
    host = torch.from_numpy(integers)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _prefill_batch(views: _Views) -> PrefillBatch:
    return PrefillBatch(
        token_ids=views["token_ids"],
        positions=views["positions"],
        rows=views["requests"],
        spans=tuple((start, end) for start, end in views.on_host("spans").tolist()),
        page_tables=views.page_tables(),
        working_slots=views["working_slots"],
        snapshots=tuple(
            (index, position, slot)
            for index, position, slot in views.on_host("scan_snapshots").tolist()
        ),
        last_tokens=views["last_tokens"],
        adapters=views.segments(),
    )


def _scored(views: _Views) -> ScoredRows | None:
    if "score_rows" not in views:
        return None
    num_best = int(views.on_host("score_best")[0])
    return ScoredRows(views["score_rows"], views["score_token_ids"], num_best)


def _ops(views: _Views) -> OpTensors:
    seeds = None
    if "seed_rows" in views:
        seeds = Seeds(views["seed_rows"], views["seed_positions"], views["seed_token_ids"])
    return OpTensors(
        copies=views.pairs_by_kind("copies"),
        clears=views["clears"] if "clears" in views else None,
        seeds=seeds,
        saves=views.pairs("saves"),
        snapshots=views.pairs("snapshots"),
    )


def _draws(views: _Views, requests: tuple[SampleRequest, ...]) -> DrawTensors:
    past = None
    if "penalties" in views:
        longest = int(views.on_host("draw_positions").max())
        past = PastPenalties(Penalties(*views.reals("penalties")), views["prompt_lens"], longest)
    return DrawTensors(
        count=views.on_host("draw_rows").size,
        rows=views["draw_rows"],
        positions=views["draw_positions"],
        num_best=int(views.on_host("num_best")[0]) if "num_best" in views else 0,
        filters=_filters(views) if "drawn" in views else None,
        past=past,
        guided=guided_draws(requests),
        rules=_rules(views),
        requests=requests,
    )


def _rules(views: _Views) -> RuleTensors | None:
    biases = allowed = words = prompt_lens = None
    if "biases" in views:
        values = views["biases"].view(torch.float64)
        biases = TokenBiases(views["bias_draws"], views["bias_token_ids"], values)
    if "allowed_ids" in views:
        allowed = AllowedTokens(views["allowed_draws"], views["allowed_rows"], views["allowed_ids"])
    if "word_draws" in views:
        words, prompt_lens = (
            BadWords(views["word_draws"], views["word_token_ids"]),
            views["prompt_lens"],
        )
    if biases is None and allowed is None and words is None:
        return None
    num_before = words.token_ids.shape[1] - 1 if words is not None else 0
    return RuleTensors(LogitRules(biases, allowed, words), prompt_lens, num_before)


def _filters(views: _Views) -> Filters:
    temperatures, top_p, min_p = views.reals("filters")
    return Filters(
        indices=views["drawn"],
        uniforms=views["uniform_bits"].double() / 2.0**UNIFORM_BITS,
        temperatures=temperatures,
        top_k=views["top_k"],
        top_p=top_p,
        min_p=min_p,
    )
