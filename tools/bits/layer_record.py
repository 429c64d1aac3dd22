"""The recorder of one sequence's way through a model.

Parts and kernels are listened to where they are called, in this process. Load the model within
`recorder`: its parts keep some kernels. Rows of a step belong to positions, and a tensor with as
many rows as the step has one for each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from itertools import accumulate, pairwise
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from tools.bits.trace import ROLES, WHOLE, EventKey, Trace, TraceEvent, called_name, parts_of
from torch import Tensor

from ferryman.model.shapes.batch import DecodeBatch


class LayerRecorder:
    """Notes calls while `step` or `rows` say which rows are watched. A position that is computed
    again is noted anew."""

    def __init__(self) -> None:
        self.trace: Trace = {}
        self.state_memory: set[int] = set()
        """Addresses of slabs: no argument in them has a row for each token."""
        self._places: dict[int, str] = {}
        self._at: list[str] = []
        self._called: list[set[str]] = []
        self._times: dict[int, Counter[tuple[str, str]]] = {}
        self._num_rows = 0
        self._positions: Mapping[int, int] = {}

    @contextmanager
    def step(self, num_rows: int, positions: Mapping[int, int]) -> Iterator[None]:
        """A step of `num_rows` tokens; `positions` are those of the watched rows."""
        for position in positions.values():
            self.trace[position], self._times[position] = [], Counter()
        with self.rows(num_rows, positions):
            yield

    @contextmanager
    def rows(self, num_rows: int, positions: Mapping[int, int]) -> Iterator[None]:
        """Calls see `num_rows` rows only."""
        before = self._num_rows, self._positions
        self._num_rows, self._positions = num_rows, positions
        try:
            yield
        finally:
            self._num_rows, self._positions = before

    @contextmanager
    def ends(self, rows: Sequence[int]) -> Iterator[None]:
        """Calls see these rows of the step, one after the other."""
        of_ends = {
            index: self._positions[row] for index, row in enumerate(rows) if row in self._positions
        }
        with self.rows(len(rows), of_ends):
            yield

    def take(self) -> Trace:
        """The trace so far; the next one begins empty."""
        taken, self.trace = self.trace, {}
        return taken

    def watch(self, model: Any, stack: ExitStack) -> None:
        """Listens to the parts of a model until the end of `stack`."""
        classes = {}
        for place, part in parts_of(model):
            self._places.setdefault(id(part), place)
            classes[type(part)] = called_name(type(part))
        for kind, method in classes.items():
            heard = self._of_part(getattr(kind, method))
            stack.enter_context(patch.object(kind, method, heard))

    def watch_kernels(self, stack: ExitStack) -> None:
        """Listens to the kernels that modules of `ferryman.model` import."""
        names = [name for name in sys.modules if name.startswith("ferryman.model.")]
        for module in map(sys.modules.__getitem__, names):
            for name, function in list(vars(module).items()):
                if _is_kernel(function):
                    stack.enter_context(patch.object(module, name, self._of_kernel(function)))
        stack.enter_context(
            patch.object(DecodeBatch, "wave_by_wave", self._of_waves(DecodeBatch.wave_by_wave))
        )

    def _of_part(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def heard(part: Any, *args: Any, **kwargs: Any) -> Any:
            place = self._places.get(id(part))
            if place is None:
                return method(part, *args, **kwargs)
            self._at.append(place)
            try:
                return self._noted(
                    WHOLE, type(part).__name__, args, kwargs, lambda: method(part, *args, **kwargs)
                )
            finally:
                self._at.pop()

        return heard

    def _of_kernel(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        name = kernel.__name__

        def heard(*args: Any, **kwargs: Any) -> Any:
            return self._noted(
                ROLES.get(name, name), name, args, kwargs, lambda: kernel(*args, **kwargs)
            )

        return heard

    def _of_waves(self, wave_by_wave: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Within it, calls have the rows of one wave."""

        def heard(batch: DecodeBatch, advance: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
            watched = self._positions
            spans = pairwise(accumulate(batch.waves, initial=0))

            def advance_heard(*parts: Tensor) -> Tensor:
                start, end = next(spans)
                of_wave = {
                    row - start: position for row, position in watched.items() if start <= row < end
                }
                with self.rows(end - start, of_wave):
                    return advance(*parts)

            return wave_by_wave(batch, advance_heard, *inputs)

        return heard

    def _noted(
        self, role: str, function: str, args: Any, kwargs: Any, call: Callable[[], Any]
    ) -> Any:
        if not self._positions:
            return call()
        named = {**{str(index): arg for index, arg in enumerate(args)}, **kwargs}
        # Taken before the call, which may write over them.
        inputs = {name: self._digests(arg) for name, arg in named.items() if self._is_rows(arg)}
        self._called.append(set())
        result = call()
        within = self._called.pop()
        if self._called:
            self._called[-1].update(within, {function})
        if outputs := self._output_rows(result):
            self._append(role, function, frozenset(within), inputs, outputs)
        return result

    def _append(
        self,
        role: str,
        function: str,
        within: frozenset[str],
        inputs: Mapping[str, Mapping[int, bytes]],
        outputs: Sequence[Tensor],
    ) -> None:
        """An event for each watched position."""
        place = self._at[-1] if self._at else ""
        for row, position in self._positions.items():
            times = self._times[position]
            times[place, role] += 1
            self.trace[position].append(
                TraceEvent(
                    EventKey(place, role, times[place, role]),
                    function,
                    within,
                    {name: digests[row] for name, digests in inputs.items()},
                    tuple(output[row] for output in outputs),
                )
            )

    def _output_rows(self, result: Any) -> list[Tensor]:
        """Copies, for later calls may write over them."""
        results = result if isinstance(result, tuple) else (result,)
        return [
            value.detach().reshape(self._num_rows, -1).clone()
            for value in results
            if self._has_rows(value)
        ]

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == self._num_rows

    def _is_rows(self, value: Any) -> bool:
        """Whether an argument is computed: integers are places, which differ with every way."""
        return (
            self._has_rows(value)
            and value.is_floating_point()
            and value.untyped_storage().data_ptr() not in self.state_memory
        )

    def _digests(self, rows: Tensor) -> dict[int, bytes]:
        flat = rows.detach().contiguous().view(len(rows), -1).view(torch.uint8).numpy()
        return {
            row: blake2b(flat[row].tobytes(), digest_size=16).digest() for row in self._positions
        }


@contextmanager
def recorder() -> Iterator[tuple[LayerRecorder, ExitStack]]:
    """A recorder of kernels, and the stack at whose end it stops listening."""
    with ExitStack() as stack:
        layers = LayerRecorder()
        layers.watch_kernels(stack)
        yield layers, stack


def _is_kernel(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.startswith("ferryman_kernels")
