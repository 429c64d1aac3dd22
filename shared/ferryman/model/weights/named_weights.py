"""Weights by name, each checked against the shape the config implies, in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.shapes.ranks import SINGLE_RANK, Group
from ferryman.model.weights.checkpoint import Checkpoint
from ferryman.model.weights.lora import LoraWeights
from ferryman.model.weights.matrix import Matrix, PlainMatrix
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman.model.weights.smoothed_matrix import SmoothedMatrix

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

WEIGHT_NAMES = ("weight", "qweight", "weight_packed")
"""The tensors in which a linear layer's weight is stored, one of them in each format."""

STORED_FLOATS = ("F64", "F32", "BF16", "F16")

OnRead = Callable[[StoredTensor], None]
"""Is called with the tensor that is read next."""

Part = Callable[[Tensor], Tensor]
"""A rank's part of a tensor; it may be a view of its argument."""


def undivided(tensor: Tensor) -> Tensor:
    """The part of a rank that keeps all of it."""
    return tensor


def uncounted(stored: StoredTensor) -> None:
    """The listener of a caller who does not count."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype a model may run in, by its name in settings."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scans accumulate and recurrent states are kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The form in which a checkpoint holds the weights of its linear layers, and a model keeps
    them: in floats, unless a format says otherwise. Its repr is part of the model's fingerprint."""

    def in_codes(self, weights: Weights, name: str, rows: int, columns: int) -> Matrix | None:
        """The weight `name`, or None if the checkpoint has it in floats. Raises ConfigError for
        codes that do not fit the config."""
        return None

    def transposed_in_codes(
        self, weights: Weights, name: str, rows: int, columns: int
    ) -> Matrix | None:
        """The weight [rows, columns] whose transpose is the tensor `name` of the folder, or None as
        `in_codes`."""
        return None

    def stack_in_codes(
        self, weights: Weights, name: str, shape: tuple[int, int, int], *, is_transposed: bool
    ) -> tuple[Matrix, ...] | None:
        """The matrices [rows, columns] of the tensor `name` of `shape` [count, rows, columns], or
        None if the checkpoint has it in floats; a transposed one has columns before rows there."""
        return None

    def of_floats(self, weight: Tensor, dtype: torch.dtype, device: torch.device) -> Matrix:
        """The matrix of a model in `dtype` from a weight [rows, columns] that is in floats."""
        return PlainMatrix(weight, dtype, device)


@dataclass(frozen=True, slots=True)
class FloatFormat(WeightFormat):
    """All weights are stored in floats, and kept in the model's dtype."""


FLOATS = FloatFormat()


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint under `prefix`, in one dtype on one device.

    A tensor is multiplied by its entry in `factors`, by full name, when it is read. `names` are the
    checkpoint's words for parts of a name that loaders call otherwise. A loader may cut a tensor
    for `group`, best by a `part`, so that the other ranks' parts are never copied. A loader that
    does not cut is correct too, because every rank sees all of the hidden state.

    A tensor that is returned never shares memory with the file. With `lora` a matrix has the parts
    of the adapters that change it.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    factors: Mapping[str, float | Tensor] = field(default_factory=dict)
    group: Group = SINGLE_RANK
    names: Mapping[str, str] = field(default_factory=dict)
    on_read: OnRead = uncounted
    format: WeightFormat = FLOATS
    lora: LoraWeights | None = None

    def under(self, name: str) -> Weights:
        """The weights of a part: `under("mamba")` reads `<prefix>mamba.<name>`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def scaled(self, factors: Mapping[str, float | Tensor]) -> Weights:
        """The same weights with factors on the named ones, so that multipliers cost nothing at run
        time.

        A factor is one number, or a tensor that broadcasts against the weight. One for each column
        [columns] multiplies the inputs of a weight in codes, which has scales for its rows.
        """
        named = {self.prefix + name: factor for name, factor in factors.items()}
        return replace(self, factors={**self.factors, **named})

    def called(self, names: Mapping[str, str]) -> Weights:
        """The same weights for a checkpoint with other words for parts of a name, between dots:
        after `called({"o_proj": "out_proj"})`, loaders of "o_proj.weight" read "out_proj.weight".
        """
        return replace(self, names={**self.names, **names})

    def tensor(self, name: str, *shape: int, part: Part = undivided) -> Tensor:
        """`part` of the tensor `name` in the model's dtype. Raises ConfigError if the tensor's
        shape is not `shape`."""
        return self._read(name, shape, part, self.dtype)

    def precise(self, name: str, *shape: int, part: Part = undivided) -> Tensor:
        """The `tensor`, but never rounded to less than the accumulation dtype."""
        return self._read(name, shape, part, accumulation_dtype(self.dtype))

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The weight `name` of a linear layer, in the bits that the model keeps it in."""
        matrix = self.format.in_codes(self, name, rows, columns)
        if matrix is None:
            matrix = self._of_floats(self.stored(name, (rows, columns), STORED_FLOATS))
        if self.lora is not None:
            module = self._full_name(name).removesuffix(".weight")
            matrix = self.lora.adapted(matrix, module, self.dtype, self.device)
        return self._multiplied(matrix, name)

    def coded(self, name: str, rows: int, columns: int) -> Matrix | None:
        """The weight `name` as it is stored in codes, without adapters; None if it is in floats."""
        matrix = self.format.in_codes(self, name, rows, columns)
        return None if matrix is None else self._multiplied(matrix, name)

    def matrices(self, name: str, count: int, rows: int, columns: int) -> tuple[Matrix, ...]:
        """The weights of `count` layers that are stored as one tensor, as experts are."""
        matrices = self._stack_in_codes(name, (count, rows, columns), is_transposed=False)
        if matrices is None:
            stacked = self.stored(name, (count, rows, columns), STORED_FLOATS)
            matrices = tuple(map(self._of_floats, stacked))
        return tuple(self._multiplied(matrix, name) for matrix in matrices)

    def transposed_matrices(
        self, name: str, count: int, rows: int, columns: int
    ) -> tuple[Matrix, ...]:
        """The `matrices`, each stored as [columns, rows]."""
        matrices = self._stack_in_codes(name, (count, rows, columns), is_transposed=True)
        if matrices is None:
            stacked = self.stored(name, (count, columns, rows), STORED_FLOATS)
            matrices = tuple(self._of_floats(weight.T) for weight in stacked)
        return tuple(self._multiplied(matrix, name) for matrix in matrices)

    def _stack_in_codes(
        self, name: str, shape: tuple[int, int, int], *, is_transposed: bool
    ) -> tuple[Matrix, ...] | None:
        return self.format.stack_in_codes(self, name, shape, is_transposed=is_transposed)

    def stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Tensor:
        """The tensor `name` as a view of its file, not to be kept. Raises ConfigError if its shape
        or dtype is another."""
        return self.checkpoint.view(self.checked(name, shape, dtypes))

    def header(self, name: str) -> StoredTensor:
        """The header of the tensor `name`. Raises ConfigError if it is missing."""
        return self._stored(name)

    def checked(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> StoredTensor:
        """The header of a tensor that is read next. Raises ConfigError as `stored` does."""
        stored = self._stored(name)
        if stored.shape != shape:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name!r} has shape {list(stored.shape)}, "
                f"but config.json implies {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise ConfigError(
                f"{stored.file}: tensor {stored.name!r} has dtype {stored.dtype}; "
                f"supported are {', '.join(dtypes)}"
            )
        for place in stored.places:
            self.on_read(place)
        return stored

    def has_module(self, name: str) -> bool:
        """Whether the checkpoint has the linear layer `name`, in floats or in codes."""
        return any(self.has(f"{name}.{suffix}") for suffix in WEIGHT_NAMES)

    def has(self, name: str) -> bool:
        return self._full_name(name) in self.checkpoint.tensors

    def first_of(self, *names: str) -> str:
        """The first of `names` that exists, or else names[0]: formats renamed tensors over time."""
        for name in names:
            if self.has(name):
                return name
        return names[0]

    def _read(self, name: str, shape: tuple[int, ...], part: Part, dtype: torch.dtype) -> Tensor:
        """`part` of a tensor in floats, or of the dequantised weight of a linear layer."""
        wide, factor = accumulation_dtype(self.dtype), self._factor(name)
        if len(shape) == 2:
            codes = replace(self, dtype=wide).coded(name, *shape)
            if codes is not None:
                return self._copied(part(codes.dequantised()), dtype)
        view = self.stored(name, shape, STORED_FLOATS)
        if factor is None:
            return self._copied(part(view), dtype)
        if not factor.ndim:
            cut = self._copied(part(view), wide)
            return cut.mul_(factor.to(wide)).to(dtype)
        # The numbers of a factor belong to places in the undivided tensor: it is cut after them.
        read = self._copied(view, wide)
        return self._copied(part(read.mul_(factor.to(read))), dtype)

    def _of_floats(self, weight: Tensor) -> Matrix:
        return self.format.of_floats(weight, self.dtype, self.device)

    def _multiplied(self, matrix: Matrix, name: str) -> Matrix:
        factor = self._factor(name)
        if factor is None:
            return matrix
        if factor.ndim == 1 and not isinstance(matrix, PlainMatrix):
            by_input = factor.to(dtype=self.dtype, device=self.device)
            return SmoothedMatrix(matrix, by_input)
        return matrix.scaled(factor)

    def _factor(self, name: str) -> Tensor | None:
        factor = self.factors.get(self._full_name(name))
        return None if factor is None else torch.as_tensor(factor, dtype=torch.float64)

    def _copied(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of its own, of which `view` may be a small part: one pass over its bytes."""
        return torch.empty(view.shape, dtype=dtype, device=self.device).copy_(view)

    def _full_name(self, name: str) -> str:
        full_name = f"{self.prefix}{name}"
        if not self.names:
            return full_name
        return ".".join(self.names.get(part, part) for part in full_name.split("."))

    def _stored(self, name: str) -> StoredTensor:
        full_name = self._full_name(name)
        if full_name not in self.checkpoint.tensors:
            files = sorted({t.file.name for t in self.checkpoint.tensors.values()})
            raise ConfigError(
                f"{self.checkpoint.folder}: tensor {full_name!r} is missing from "
                f"{', '.join(files) or 'the checkpoint'}"
            )
        return self.checkpoint.tensors[full_name]
