"""A loop's two versions, alone and shared, stay apart: in memory and in the cache on disk.

One process fills the cache of a loop, and another reads it; the folder of the cache is new.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

# Each iteration writes down the thread that ran it. numba divides a loop among its threads evenly.
TOY = """
import json
import sys

import numpy as np
import torch
from numba import get_thread_id, set_num_threads

from ferryman_kernels._compiled import WORTH_SHARING, Loop, prange


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


@pytest.mark.parametrize("order", [("1", "32768"), ("32768", "1")])
def test_each_version_runs_as_compiled_and_as_cached(tmp_path: Path, order: list[str]) -> None:
    toy = tmp_path / "toy.py"
    toy.write_text(TOY)
    chosen = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "NUMBA_NUM_THREADS": "2"}
    for _ in ("compiled", "cached"):
        ran = subprocess.run(
            [sys.executable, toy, *order],
            env={**os.environ, **chosen},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert json.loads(ran.stdout) == [[0], [0, 1]]
    assert len(list((tmp_path / "cache").rglob("*.nbi"))) == 2
