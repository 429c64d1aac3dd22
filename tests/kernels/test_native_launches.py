"""Launches of compiled loops run one after another without Python, with what they were given."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from ferryman_kernels.cpu import native_launches
from ferryman_kernels.cpu._compiled import WORTH_SHARING, Loop, numba, prange
from ferryman_kernels.cpu.launches import RecordedLaunch, launches_told_to
from ferryman_kernels.cpu.native_launches import launch_pieces, native_launch, native_run

pytestmark = pytest.mark.skipif(numba is None, reason="there are no compiled loops")


def _write_all(
    out: Any, whole: int, less: int, real: float, narrow: Any, short: Any, nothing: Any,
    sizes: Any, grid: Any,
) -> None:  # fmt: skip
    for i in prange(1):
        out[i], out[1], out[2], out[3], out[4] = whole, less, real, narrow, short
        out[5] = 1 if nothing is None else 0
        out[6], out[7] = sizes[0], sizes[1][1]
        out[8], out[9] = grid.shape[0], grid[1, 2]


def _add_one(out: Any, at: int) -> None:
    for i in prange(out.shape[0]):
        out[i] += at


def _fail(out: Any, at: int) -> None:
    for i in prange(1):
        if at >= 0:
            raise ValueError("a loop that fails")
        out[i] = at


def _write_sum(out: Any, numbers: Any) -> None:
    for i in prange(1):
        out[i] = len(numbers)


def _write_one(out: Any, number: Any) -> None:
    for i in prange(1):
        out[i] = number


_all_loop, _one_loop = Loop(_write_all), Loop(_add_one)
_failing_loop, _other_loop = Loop(_fail), Loop(_write_sum)


def recorded(loop: Loop, elements: int, *args: Any) -> RecordedLaunch:
    launches: list[RecordedLaunch] = []
    with launches_told_to(launches.append):
        loop(elements, *args)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("elements", [1, WORTH_SHARING])
def test_a_loop_gets_the_numbers_tuples_and_arrays_that_it_was_given(elements: int) -> None:
    out, grid = np.zeros(10), np.arange(12, dtype=np.float32).reshape(3, 4)
    launch = recorded(
        _all_loop, elements, out, 1 << 40, -7, 0.1, np.float32(-2.5), np.uint16(65000), None,
        (3, (4, 1 << 33)), grid,
    )  # fmt: skip
    right = [1 << 40, -7, 0.1, -2.5, 65000, 1, 3, 1 << 33, 3, 6]
    assert out.tolist() == right
    out[:], grid[1, 2] = 0, 8.5
    native = native_launch(launch)
    assert native is not None
    native_run([native])()
    assert out.tolist() == [*right[:-1], 8.5]


def test_launches_alone_and_shared_run_in_their_order() -> None:
    out = np.zeros(1000, np.int64)
    launches = [
        recorded(_one_loop, elements, out, at)
        for elements, at in ((1, 1), (WORTH_SHARING, 10), (1, 100))
    ]
    shared = torch.get_num_threads() > 1
    assert [launch.run is launch.loop for launch in launches] == [True, not shared, True]
    natives = [native_launch(launch) for launch in launches]
    run = native_run([native for native in natives if native is not None])
    assert len(run.launches) == 3
    run()
    run()
    assert out.tolist() == [333] * 1000


def test_the_loop_that_fails_is_the_last_one() -> None:
    out = np.zeros(4, np.int64)
    first, failing, last = (
        recorded(_one_loop, 1, out, 1),
        recorded(_failing_loop, 1, np.zeros(1, np.int64), -1),
        recorded(_one_loop, 1, out, 10),
    )
    failing = RecordedLaunch(failing.run, (failing.args[0], 5), failing.loop)
    natives = [native_launch(launch) for launch in (first, failing, last)]
    with pytest.raises(RuntimeError, match="_fail"):
        native_run([native for native in natives if native is not None])()
    assert out.tolist() == [12] * 4


def test_other_calls_and_other_arguments_stay_with_python() -> None:
    out = np.zeros(1, np.int64)
    with_text = recorded(_other_loop, 1, out, "four")
    assert out.tolist() == [4]
    assert native_launch(with_text) is None
    assert native_launch(RecordedLaunch(print, ())) is None


@pytest.mark.parametrize("number", [0, -1, True, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 63])
def test_a_whole_number_has_the_type_that_the_loop_was_compiled_for(number: int) -> None:
    out = np.zeros(1)
    native = native_launch(recorded(Loop(_write_one), 1, out, number))
    assert out.tolist() == [float(number)]
    assert native is not None
    out[:] = 7
    native_run([native])()
    assert out.tolist() == [float(number)]


def test_a_loop_is_asked_for_its_function_once_for_all_launches_of_the_same_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, out = Loop(_write_one), np.zeros(1)
    launches = [recorded(loop, 1, out, number) for number in (1, 2, 2.5, 3, 4.5)]
    library, asked = _library_of(launches[0]), list[str]()
    address_of = type(library).get_pointer_to_function

    def counted(self: Any, name: str) -> int:
        asked.append(name)
        return int(address_of(self, name))

    monkeypatch.setattr(type(library), "get_pointer_to_function", counted)
    (piece,) = launch_pieces(launches)
    piece.run()
    assert out.tolist() == [4.5]
    functions = [name for name in asked if not name.startswith("ferryman_")]
    assert len(functions) == len(set(functions)) == 2


def test_a_loop_with_other_words_than_were_expected_stays_with_python(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another version of numba passed an array in more parts."""
    out = np.zeros(1)
    launches = [recorded(Loop(_write_one), 1, out, 5)] * 2
    monkeypatch.setattr(native_launches, "_NO_OWNER", [0, 0, 0])
    out[:] = 0
    with caplog.at_level(logging.WARNING):
        pieces = list(launch_pieces(launches))
    assert [piece.num_launches for piece in pieces] == [1, 1]
    pieces[0].run(*pieces[0].args)
    assert out.tolist() == [5]
    (line,) = caplog.messages
    assert "_write_one_alone is launched from Python" in line


def test_a_loop_without_an_address_stays_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = recorded(Loop(_write_one), 1, np.zeros(1), 6)
    monkeypatch.setattr(type(_library_of(launch)), "get_pointer_to_function", lambda *args: 0)
    assert native_launch(launch) is None


def _library_of(launch: RecordedLaunch) -> Any:
    (compiled, *_) = launch.loop.overloads.values()
    return compiled.library
