"""Libraries lose what lies behind their segments, and can still be loaded."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil
from pathlib import Path

import pytest
from tools.strip_libraries import WORTHWHILE_BYTES, cut, loaded_bytes, main

LIBRARY = Path(_ctypes.__file__)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A real one with what could be a long symbol table behind it."""
    path = tmp_path / "deep" / "library.so"
    path.parent.mkdir()
    shutil.copy(LIBRARY, path)
    with path.open("ab") as file:
        file.write(bytes(2 * WORTHWHILE_BYTES))
    return path


def test_a_library_is_cut_behind_its_segments_and_loads(library: Path) -> None:
    before = library.stat().st_size
    wanted = loaded_bytes(library)
    assert cut(library) == before - wanted >= 2 * WORTHWHILE_BYTES
    assert library.stat().st_size == wanted
    assert ctypes.PyDLL(str(library)).PyInit__ctypes


def test_a_second_time_nothing_is_left_to_cut(library: Path) -> None:
    cut(library)
    left = library.read_bytes()
    assert cut(library) == 0
    assert library.read_bytes() == left


@pytest.mark.parametrize("content", [b"", b"GROUP ( libm.so )", b"\x7fELF\x01\x01" + bytes(60)])
def test_what_is_no_library_of_64_bits_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(content + bytes(2 * WORTHWHILE_BYTES))
    assert cut(path) == 0
    assert path.stat().st_size == len(content) + 2 * WORTHWHILE_BYTES


def test_folders_are_searched(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(str(library.parent.parent))
    assert library.stat().st_size == loaded_bytes(library)
    assert capsys.readouterr().out.endswith(" MB of symbols cut off\n")
