"""A step's numbers as one buffer: one transfer to the device, then views.

    plan ──pack──► PackedStep(buffer, places) ──upload──► one int64 tensor ──unpack──► StepTensors
                       │ as_vector, from_vector
                       ▼
                   the plan vector: all that another rank needs to run the step

An array has a name, and is there only if the step needs it. Arrays that go together are a group,
`group.field`, and come back as the dataclass with those fields. All are integers but REALS, which
travel in the same int64 buffer by their bits. Values that only control loops are read from the
host's copy, and never read back.

Every array begins at an even word: kernels for 16 aligned bytes are others than for 8, and a card
would compile both. Of a decode step with a size the arrays up to `kept` are its *body*, which lies
at the same places in every step of that size.

The vector: how many arrays; for each array its name in 24 bytes, and its one or two sides; the
buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.schedule.batch import Ints

REALS = frozenset(
    {
        "biases.values",
        "filters.uniforms",
        "filters.temperatures",
        "filters.top_p",
        "filters.min_p",
        "penalties.repetition",
        "penalties.presence",
        "penalties.frequency",
    }
)
Arrays = Mapping[str, ArrayLike]
Fields = TypeVar("Fields")


def group(name: str, **fields: ArrayLike) -> Arrays:
    """Arrays that `StepViews.group` reads as one value."""
    return {f"{name}.{field}": values for field, values in fields.items()}


@dataclass(frozen=True, slots=True)
class PackedStep:
    """All numbers of a step, one array after another; `places` gives each array's place."""

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


_NAME_BYTES = 24
_NAME_WORDS = 3
_HEADER_WORDS = _NAME_WORDS + 2
_NO_SIDE = -1


def packed_step(arrays: Arrays) -> PackedStep:
    """The arrays in one buffer, in their order."""
    words = {name: _words(name, values) for name, values in arrays.items()}
    places, begin = {}, 0
    for name, array in words.items():
        places[name] = (begin, array.shape)
        begin += _even(array.size)
    buffer = np.zeros(begin, np.int64)
    for name, array in words.items():
        at = places[name][0]
        buffer[at : at + array.size] = array.ravel()
    return PackedStep(buffer, places)


def _words(name: str, values: ArrayLike) -> Ints:
    if name in REALS:
        return np.asarray(values, np.float64).view(np.int64)
    array = np.asarray(values)
    assert array.dtype.kind in "biu" or not array.size, f"{name}: its numbers belong in REALS"
    return array.astype(np.int64, copy=False)


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


def _even(words: int) -> int:
    return words + words % 2


class StepViews:
    """The arrays of a packed step by name: views of `uploaded`, or the host's copy."""

    def __init__(self, packed: PackedStep, uploaded: Tensor) -> None:
        self._packed, self._uploaded = packed, uploaded

    @property
    def device(self) -> torch.device:
        return self._uploaded.device

    def __contains__(self, name: str) -> bool:
        return name in self._packed.places

    def __getitem__(self, name: str) -> Tensor:
        begin, shape = self._packed.places[name]
        view = self._uploaded[begin : begin + prod(shape)]
        if len(shape) > 1:
            view = view.view(shape)
        return view.view(torch.float64) if name in REALS else view

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self else None

    def group(self, name: str, made: type[Fields]) -> Fields | None:
        """The dataclass `made` of the group `name`, if the step has it."""
        fields: tuple[str, ...] = made.__match_args__  # type: ignore[attr-defined]
        if f"{name}.{fields[0]}" not in self:
            return None
        return made(*(self[f"{name}.{field}"] for field in fields))

    def by_kind(self, name: str) -> Mapping[Kind, Tensor]:
        names = {kind: f"{name}.{kind}" for kind in Kind}
        return {kind: self[array] for kind, array in names.items() if array in self}

    def on_host(self, name: str) -> Ints:
        return self._packed.array(name)

    def number(self, name: str) -> int:
        """The only number of an array, from the host."""
        return int(self.on_host(name)[0])

    def before(self, name: str) -> Tensor:
        """All words before an array."""
        return self._uploaded[: self._packed.places[name][0]]
