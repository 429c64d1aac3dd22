"""The cache of compiled loops on disk, with other processes in the same folder, damaged or full."""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba")

import ferryman_kernels
from ferryman_kernels.cpu import _compiled
from ferryman_kernels.cpu._loop_cache import LoopFiles, digest_of_sources

# Doubles every second number, or each of them; `full` lets the process write no file.
TOY = """
import logging
import os
import resource
import sys

import numpy as np

from ferryman_kernels.cpu._compiled import Loop


def double(numbers, found):
    for i in range(len(numbers)):
        found[i] = 2 * numbers[i]


logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
step = int(sys.argv[1])
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
loop, found = Loop(double), np.zeros(4)
loop(1, np.arange(4.0 * step)[::step], found)
os.write(1, f"{found.tolist()} {sum(loop.alone.stats.cache_hits.values())}".encode())
"""
EACH, SECOND = "[0.0, 2.0, 4.0, 6.0]", "[0.0, 4.0, 8.0, 12.0]"


# Forks a process for each line of input: a folder, and the arguments of its toy. The processes
# share one import of torch and numba, two seconds of a core.
FORKS = """
import json
import os
import runpy
import sys
import traceback

import numba

import ferryman_kernels.cpu._compiled


def run(folder, *args):
    os.environ["NUMBA_CACHE_DIR"] = f"{folder}/cache"
    numba.config.reload_config()
    sys.argv = [f"{folder}/toy.py", *args]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


for line in sys.stdin:
    pid = os.fork() or run(*json.loads(line))
    _, status = os.waitpid(pid, 0)
    os.write(1, b"\\n")
    os.write(2, b"%d\\n" % status)
"""


class ToyForks:
    """Runs the toy of a folder, each time in a process that has run no loop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, folder: Path, *args: str) -> str:
        return self.ran(folder, *args)[0]

    def ran(self, folder: Path, *args: str) -> tuple[str, list[str]]:
        """The answer, and the lines of standard error."""
        toy = folder / "toy.py"
        if not toy.exists():  # its time is part of what a file is compiled for
            toy.write_text(TOY)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.write(json.dumps([str(folder), *args]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().rstrip("\n")
        errors = []
        while not (line := self._process.stderr.readline().rstrip("\n")).isdigit():
            assert line, "the server of forks lives"
            errors.append(line)
        assert line == "0", errors
        return answer, errors


@pytest.fixture(scope="module")
def toys() -> Iterator[ToyForks]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        yield ToyForks(process)


def test_two_processes_that_compile_at_once_keep_their_files_apart(tmp_path: Path) -> None:
    """Between the look of one at the folder and its file comes all of the other's."""
    one, other = (LoopFiles(tmp_path, "loop", "source") for _ in range(2))
    keys = ("float32, every element", "zen"), ("float32, every second element", "zen")
    assert one.load(keys[0]) is other.load(keys[1]) is None
    one.save(keys[0], "one")
    other.save(keys[1], "other")
    assert [LoopFiles(tmp_path, "loop", "source").load(key) for key in keys] == ["one", "other"]


def test_other_types_processors_and_sources_have_other_files(tmp_path: Path) -> None:
    files = LoopFiles(tmp_path, "loop", ("today", 1))
    files.save(("float32", "zen4 +avx512bf16"), "fast")
    assert files.load(("float32", "zen4 +avx512bf16")) == "fast"
    assert files.load(("float32", "zen2")) is None
    assert files.load(("float64", "zen4 +avx512bf16")) is None
    assert (
        LoopFiles(tmp_path, "loop", ("tomorrow", 1)).load(("float32", "zen4 +avx512bf16")) is None
    )


def test_a_second_process_reads_what_the_first_compiled(tmp_path: Path, toys: ToyForks) -> None:
    assert [toys.answer(tmp_path, "1") for _ in range(2)] == [f"{EACH} 0", f"{EACH} 1"]
    assert [toys.answer(tmp_path, "2") for _ in range(2)] == [f"{SECOND} 0", f"{SECOND} 1"]


def test_a_loop_that_is_not_on_disk_is_named_when_it_is_compiled(
    tmp_path: Path, toys: ToyForks
) -> None:
    told = [toys.ran(tmp_path, "1")[1] for _ in range(2)]
    assert told == [["ferryman_kernels.compiling __main__.double_alone"], []]


def test_a_loop_that_another_process_compiles_is_named_by_those_that_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one is done as soon as somebody is heard to wait for it."""

    def double_alone_digest() -> None: ...

    loop = SimpleNamespace(
        stats=SimpleNamespace(cache_path=str(tmp_path)), py_func=double_alone_digest
    )
    compiling = logging.getLogger("ferryman_kernels.compiling")
    with (
        (tmp_path / f"{double_alone_digest.__qualname__}.lock").open("wb") as other,
        caplog.at_level(logging.INFO, compiling.name),
    ):
        fcntl.flock(other, fcntl.LOCK_EX)

        def done(record: logging.LogRecord) -> bool:
            fcntl.flock(other, fcntl.LOCK_UN)
            return True

        compiling.addFilter(done)
        try:
            with _compiled._turn(loop):
                assert caplog.messages == ["test_loop_cache.double_alone"]
        finally:
            compiling.removeFilter(done)


@pytest.mark.parametrize(
    "kept", [0, 7, 40, -1], ids=["nothing", "a digest's part", "40", "all but 1"]
)
def test_a_damaged_file_is_compiled_anew(tmp_path: Path, toys: ToyForks, kept: int) -> None:
    toys.answer(tmp_path, "1")
    for path in _files(tmp_path):
        path.write_bytes(path.read_bytes()[:kept])
    assert [toys.answer(tmp_path, "1") for _ in range(2)] == [f"{EACH} 0", f"{EACH} 1"]


def test_a_loop_runs_where_no_file_can_be_written(tmp_path: Path, toys: ToyForks) -> None:
    assert toys.answer(tmp_path, "1", "full") == f"{EACH} 0"
    assert list(_files(tmp_path)) == []


def test_a_part_from_any_file_of_the_package_changes_the_name(tmp_path: Path) -> None:
    """`mamba_step` takes a part from `ssd_decode`, in another folder than the loops' compiler."""
    assert Path(ferryman_kernels.__path__[0]) == _compiled._PACKAGE
    found = []
    (tmp_path / "recurrence").mkdir()
    for content in ("1", "2"):
        (tmp_path / "recurrence" / "ssd_decode.py").write_text(content)
        found.append(digest_of_sources.__wrapped__(tmp_path))
    assert found[0] != found[1]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in (folder / "cache").rglob("*.nbc"))
