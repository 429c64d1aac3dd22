"""The state manifest: the layout of a model's cached state, byte for byte.

A slot holds all layers of its kind contiguously, so all code except the model's own kernels treats
a slot as one blob. The manifest is generated from the model definition. Its digest is compared at
every hand-off and at every read from a tier, and it enters the root of all page keys.

It also names the arithmetic: all that decides the bits, besides the model and the tokens.

    processor / loops / numbers / kernel revision / ranks
    cpu/amx-bf16.sapphirerapids/bfloat16/r2965f0ee/tp1
    cuda/9.0-nvidia-h200/bfloat16/r7be01c52/tp1

So state of another arithmetic is never found: not on a device, not in a tier, not at a peer. Where
reuse is exact in values alone, the manifest has ANY_ARITHMETIC, and all of it is shared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

DTYPE_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
SECTION_ALIGNMENT = 64
ANY_ARITHMETIC = "any"
CARD = "cuda"
"""The processor of an arithmetic on a card."""


class Kind(StrEnum):
    """The way in which a layer's state can be cut."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor inside a slot: its place, and the axis along which tensor parallelism cuts it.

    `shard_axis` None: every rank holds all of it. A row of a page stands for `positions_a_row`, and
    lies in the page of the last of them; a page that is shorter has one row (`rows_within`).
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    offset: int
    shard_axis: int | None
    positions_a_row: int = 1

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def rows_within(self, computed: range) -> int:
        """The number of rows that are written as these positions of one page, or of some that
        follow each other, are computed."""
        return computed.stop // self.positions_a_row - computed.start // self.positions_a_row


@dataclass(frozen=True, slots=True)
class SectionSpec:
    """A section before it has a place.

    `parts` (name, length along axis 0) divide it into sections of their own, because each is
    sharded separately. They follow each other without padding, so one strided view covers them all.
    `positions_a_row` are as in `Section`.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None
    parts: tuple[tuple[str, int], ...] = ()
    positions_a_row: int = 1

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def placed(self, offset: int) -> Iterator[Section]:
        """The spec at `offset`: one section, or one for each part."""
        rest = self.shard_axis, self.positions_a_row
        if not self.parts:
            yield Section(self.name, self.layer, self.shape, self.dtype, offset, *rest)
        for name, length in self.parts:
            shape = (length, *self.shape[1:])
            part = f"{self.name}.{name}"
            section = Section(part, self.layer, shape, self.dtype, offset, *rest)
            yield section
            offset += section.num_bytes


@dataclass(frozen=True, slots=True)
class KindLayout:
    """All sections of one kind, in the order of memory. `slot_bytes` is a multiple of 64."""

    kind: Kind
    sections: tuple[Section, ...]
    slot_bytes: int

    def section(self, name: str, layer: int) -> Section:
        for section in self.sections:
            if (section.name, section.layer) == (name, layer):
                return section
        raise KeyError(f"{self.kind} layout has no section {name!r} of layer {layer}")

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(section.layer for section in self.sections))


def lay_out(kind: Kind, specs: Iterable[SectionSpec]) -> KindLayout:
    """Places specs one after the other, each at a multiple of 64 bytes."""
    sections: list[Section] = []
    offset = 0
    for spec in specs:
        sections += spec.placed(offset)
        offset = _aligned(offset + spec.num_bytes)
    return KindLayout(kind, tuple(sections), offset)


def _aligned(offset: int) -> int:
    return -(-offset // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


class Exactness(StrEnum):
    """The degree to which an answer that reuses state equals one that computes all anew."""

    BITS = "bits"
    """The same bits: whatever was reused, batched or resumed."""
    VALUES = "values"
    """The same state at the same position, but for rounding."""

    @classmethod
    def under(cls, arithmetic: str) -> Exactness:
        """The level of state that was made under `arithmetic`, by a manifest's field."""
        return cls.VALUES if arithmetic in ("", ANY_ARITHMETIC) else cls.BITS

    @classmethod
    def least(cls, levels: Iterable[Exactness]) -> Exactness:
        """The level that all of several answers or workers have."""
        of_all = set(levels)
        return cls.BITS if of_all == {cls.BITS} else cls.VALUES

    @classmethod
    def over(cls, arithmetics: Iterable[str]) -> Exactness:
        """The level of an answer whose parts were computed under `arithmetics`, one after the
        other: bits of two arithmetics together are those of neither."""
        used = set(arithmetics)
        return cls.under(used.pop()) if len(used) == 1 else cls.VALUES


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One arithmetic; its text is what a manifest has.

    `loops` are those that the processor takes, with its class; `numbers` the dtype in which they
    compute; `revision` that of the kernels. Sums over ranks are taken in the order of ranks, so
    another number of them has other bits.
    """

    processor: str
    loops: str
    numbers: str
    revision: str
    num_ranks: int

    def __str__(self) -> str:
        return f"{self.processor}/{self.loops}/{self.numbers}/r{self.revision}/tp{self.num_ranks}"


@dataclass(frozen=True, slots=True)
class ResumeShape:
    """The part of a manifest that decides at which page ends a chain of keys can be resumed."""

    page_size: int
    window_len: int
    kinds: frozenset[Kind]

    @classmethod
    def of(cls, manifest: StateManifest) -> ResumeShape:
        return cls(manifest.page_size, manifest.window_len, frozenset(manifest.kinds))


@dataclass(frozen=True)
class StateManifest:
    """A model's state: the layout of each kind it has. `window_len` is 0 without window layers.

    `scan_chunk` is the grid on which the recurrent scan may be cut. It divides `page_size`, and is
    1 where bits are promised: there a scan goes token by token.
    `arithmetic` names what else decides the bits; ANY_ARITHMETIC where they are not promised.
    """

    fingerprint: str
    page_size: int
    scan_chunk: int
    window_len: int
    layouts: tuple[KindLayout, ...]
    arithmetic: str = ANY_ARITHMETIC

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, not {self.page_size}")
        if self.page_size % self.scan_chunk:
            raise ValueError(
                f"scan_chunk {self.scan_chunk} does not divide page_size {self.page_size}"
            )
        if (self.window_len > 0) != (Kind.WINDOW in self.kinds):
            raise ValueError("window_len and the window layout come together")

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(layout.kind for layout in self.layouts)

    def layout(self, kind: Kind) -> KindLayout:
        for layout in self.layouts:
            if layout.kind is kind:
                return layout
        raise KeyError(f"this model has no {kind} state")

    @property
    def exactness(self) -> Exactness:
        """The level of answers that reuse this state."""
        return Exactness.under(self.arithmetic)

    @property
    def is_exact_on_card(self) -> bool:
        """Whether the arithmetic promises bits on a card, where that takes kernels of its own."""
        return self.arithmetic.startswith(f"{CARD}/")

    @cached_property
    def digest(self) -> str:
        """32 hex digits; equal digests mean equal state in every slot for equal tokens, to the bit
        unless the arithmetic is ANY_ARITHMETIC."""
        canonical = json.dumps(self._fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    @cached_property
    def text(self) -> str:
        """The manifest as JSON, which each hand-off carries; `manifest_from_json` reads it back."""
        return json.dumps(self._fields(), sort_keys=True)

    def _fields(self) -> dict[str, Any]:
        """All fields as JSON has them. Rows of one position do not say so: the digests under which
        tiers keep state are older than rows of several."""
        fields = asdict(self)
        for layout in fields["layouts"]:
            for section in layout["sections"]:
                if section["positions_a_row"] == 1:
                    del section["positions_a_row"]
        return fields

    def differences(self, other: StateManifest) -> tuple[str, ...]:
        """The reasons why state of `other` cannot be used here, one line each; empty if it can."""
        names = ("fingerprint", "page_size", "scan_chunk", "window_len", "arithmetic", "kinds")
        differences = [
            f"{name}: {getattr(self, name)} here, {getattr(other, name)} there"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]
        differences += [
            _layout_difference(self.layout(kind), other.layout(kind))
            for kind in self.kinds
            if kind in other.kinds and self.layout(kind) != other.layout(kind)
        ]
        return tuple(differences)


def _layout_difference(here: KindLayout, there: KindLayout) -> str:
    for mine, theirs in zip(here.sections, there.sections, strict=False):
        if mine != theirs:
            return f"{here.kind} {mine.name} of layer {mine.layer}: {_differing(mine, theirs)}"
    return f"{here.kind}: {len(here.sections)} sections here, {len(there.sections)} there"


def _differing(here: Section, there: Section) -> str:
    """The fields that differ, with both values."""
    mine, theirs = asdict(here), asdict(there)
    return ", ".join(f"{n} {mine[n]} here, {theirs[n]} there" for n in mine if mine[n] != theirs[n])


def manifest_from_json(text: str) -> StateManifest:
    """Inverse of `StateManifest.text`; raises ValueError or KeyError if the text is no manifest."""
    raw = json.loads(text)
    layouts = tuple(
        KindLayout(
            Kind(layout["kind"]),
            tuple(Section(**{**s, "shape": tuple(s["shape"])}) for s in layout["sections"]),
            layout["slot_bytes"],
        )
        for layout in raw["layouts"]
    )
    return StateManifest(
        raw["fingerprint"],
        raw["page_size"],
        raw["scan_chunk"],
        raw["window_len"],
        layouts,
        raw["arithmetic"],
    )
