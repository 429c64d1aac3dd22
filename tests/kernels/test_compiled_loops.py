"""A loop's two versions, alone and shared, stay apart: in memory and in the cache on disk.

One process fills the cache of a loop, and another reads it; the folder of the cache is new. Loops'
own `exp`, and their vectors, do what they say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferryman_kernels.cpu._compiled import STRICT, WORTH_SHARING, Loop, exp, numba
from ferryman_kernels.cpu._vectors import (
    LANES,
    exps,
    fused,
    greater,
    greatest,
    load,
    spread,
    store,
    store_totals,
    total,
)

pytest.importorskip("numba")

# Each iteration writes down the thread that ran it. numba divides a loop among its threads evenly.
TOY = """
import json
import sys

import numpy as np
import torch
from numba import get_thread_id, set_num_threads

from ferryman_kernels.cpu._compiled import WORTH_SHARING, Loop, prange


def ran_on(threads):
    for i in prange(threads.shape[0]):
        threads[i] = get_thread_id()


torch.set_num_threads(2)
set_num_threads(2)  # starts the threads: before that none has a number
loop = Loop(ran_on)
found = {}
for elements in map(int, sys.argv[1:]):
    threads = np.full(64, -1, np.int64)
    loop(elements, threads)
    found[elements] = sorted(set(threads.tolist()))
print(json.dumps([found[1], found[WORTH_SHARING]]))
"""


FEW_AND_MANY = ("1", str(WORTH_SHARING))

POOL = """
import json
import os

import numpy as np
import torch

from ferryman_kernels.cpu._compiled import WORTH_SHARING, Loop, numba, prange


def ran_on(threads):
    for i in prange(threads.shape[0]):
        threads[i] = numba.get_thread_id()


def started():
    return len(os.listdir("/proc/self/task"))


torch.set_num_threads(2)
loop, ids = Loop(ran_on), np.full(64, -1, np.int64)
loop.shared  # compiled before threads are counted
torch.ones(2000, 2000) @ torch.ones(2000, 2000)
before = started()
loop(WORTH_SHARING, ids)
print(json.dumps([sorted(set(ids.tolist())), started() - before, torch.get_num_threads()]))
"""


SAME = """
import numpy as np

from ferryman_kernels.cpu._compiled import Loop


def counted(numbers):
    for i in range(numbers.shape[0]):
        numbers[i] = i


loop, numbers = Loop(counted), np.zeros(8)
loop(1, numbers)
assert numbers[7] == 7
print(sum(loop.alone.stats.cache_misses.values()))
"""


def test_of_two_processes_that_need_a_loop_one_compiles_it(tmp_path: Path) -> None:
    same = tmp_path / "same.py"
    same.write_text(SAME)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(same)]
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert sorted(process.communicate(timeout=120)[0] for process in both) == ["0\n", "1\n"]


@pytest.mark.parametrize(
    "order", [FEW_AND_MANY, pytest.param(FEW_AND_MANY[::-1], marks=pytest.mark.slow)]
)
def test_each_version_runs_as_compiled_and_as_cached(tmp_path: Path, order: list[str]) -> None:
    for _ in ("compiled", "cached"):
        assert _answer_of(TOY, tmp_path, *order, NUMBA_NUM_THREADS="2") == [[0], [0, 1]]
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 2


@pytest.mark.skipif(numba.config.THREADING_LAYER != "omp", reason="no OpenMP library for numba")
def test_loops_run_on_the_threads_of_torch_and_leave_their_number(tmp_path: Path) -> None:
    """Two pools of threads on the same cores wait for each other."""
    found = _answer_of(POOL, tmp_path, NUMBA_NUM_THREADS="4", OMP_NUM_THREADS="2")
    assert found == [[0, 1], 0, 2]


def _answer_of(source: str, folder: Path, *args: str, **environment: str) -> Any:
    """The JSON that a process prints; the cache of its loops lies in the folder."""
    toy = folder / "toy.py"
    toy.write_text(source)
    ran = subprocess.run(
        [sys.executable, toy, *args],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(ran.stdout)


def _exp_of(numbers: Any, powers: Any) -> None:
    for i in range(len(numbers)):
        powers[i] = exp(numbers[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_of_nan_is_nan_and_of_the_lowest_numbers_zero(dtype: Any) -> None:
    finite = [-1e30, -64.5, -63.0, 0.0, 1.0, 80.0, 88.3]
    numbers = np.array([np.nan, -np.inf, np.inf, *finite] * 8, dtype)
    if dtype is np.float32:
        numbers[3::10] = 88.5  # its power is a number still, and taken for none
    powers = np.full_like(numbers, 7)
    Loop(_exp_of)(1, numbers, powers)
    expected = np.exp(numbers.astype(np.float64))
    if dtype is np.float32:
        expected[numbers > 88.4] = np.inf
    if dtype is np.float32:
        # Products with smaller powers would be subnormal, which processors multiply slowly.
        expected[numbers < -64] = 0
    np.testing.assert_allclose(powers, expected, rtol=2e-7)


def _exps_of(numbers: Any, powers: Any) -> None:
    for at in range(0, len(numbers), LANES):
        store(powers, at, exps(load(numbers, at)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_has_the_same_bits_alone_in_a_vector_and_in_a_loop_of_any_length(dtype: Any) -> None:
    numbers = np.random.default_rng(0).uniform(-70, 90, 40 * LANES).astype(dtype)
    numbers[:3] = np.nan, np.inf, -np.inf
    in_vectors, in_loop, alone = (np.full_like(numbers, 7) for _ in range(3))
    Loop(_exps_of, STRICT)(1, numbers, in_vectors)
    loop = Loop(_exp_of, STRICT)
    loop(1, numbers, in_loop)
    for i in range(len(numbers)):
        loop(1, numbers[i : i + 1], alone[i : i + 1])
    assert in_vectors.tobytes() == in_loop.tobytes() == alone.tobytes()


def _lanes(numbers: Any, factors: Any, found: Any) -> None:
    a, b = load(numbers, 1), load(factors, 3)
    products = fused(a, b, spread(found.dtype.type(0.5)))
    store(found, 0, products)
    store_totals(found, LANES, a, b, products, spread(found.dtype.type(2)))
    found[LANES + 4] = total(products)
    found[LANES + 5] = greatest(greater(a, spread(found.dtype.type(3))))
    found[LANES + 6] = greatest(a)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
def test_vectors_in_loops_load_multiply_and_add_up(dtype: Any) -> None:
    """With small integers every sum is exact."""
    numbers, factors = np.arange(-9.0, 11.0), np.arange(5.0, 25.0)
    kind = np.float64 if dtype is np.float64 else np.float32
    found = np.full(LANES + 7, np.nan, kind)
    Loop(_lanes, STRICT)(1, _stored(numbers, dtype), _stored(factors, dtype), found)
    a, b = numbers[1 : 1 + LANES], factors[3 : 3 + LANES]
    products = a * b + 0.5
    sums = [a.sum(), b.sum(), products.sum(), 2.0 * LANES]
    assert found.tolist() == [*products, *sums, products.sum(), a.max(), a.max()]


def _stored(numbers: Any, dtype: Any) -> Any:
    """The numbers in `dtype`; uint16 stands for bfloat16, the upper half of a float32."""
    if dtype is not np.uint16:
        return numbers.astype(dtype)
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
