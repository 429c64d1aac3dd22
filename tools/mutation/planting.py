"""Plants a defect in this process, which has imported the tree, and in those that it starts."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

SHELVES = ("services", "shared", "kernels")
CodeKey = tuple[str, int]  # qualified name and first line
FunctionIndex = Mapping[str, Sequence[FunctionType]]


def function_index(root: Path) -> FunctionIndex:
    """All functions of this process whose code stands in the tree at `root`, by path."""
    index: dict[str, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(f"{root}/"):
            index[thing.__code__.co_filename].append(thing)
    gc.freeze()
    return index


def plant(root: Path, file: str, source: bytes, index: FunctionIndex, place: Path) -> str | None:
    """Plants `source` in place of `file`; links go to the empty folder `place`.

    Returns why that is impossible here, or None.
    """
    path = str(root / file)
    _plant_in_processes(root, file, source, place)
    name = ".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__")
    if name not in sys.modules:
        sys.meta_path.insert(0, OneModule(name, place / file))
        return None
    new = dict(_codes(compile(source, path, "exec", dont_inherit=True)))
    old = dict(_codes(compile((root / file).read_bytes(), path, "exec", dont_inherit=True)))
    for function in index.get(path, ()):
        key = (function.__code__.co_qualname, function.__code__.co_firstlineno)
        if key in new and key in old and new[key] != old[key]:
            if new[key].co_freevars != function.__code__.co_freevars:
                return "the function holds other variables then"
            function.__code__ = new[key]
    return None


def _codes(code: CodeType) -> Iterator[tuple[CodeKey, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _codes(constant)


def _plant_in_processes(root: Path, file: str, source: bytes, place: Path) -> None:
    """Processes that tests start import a folder of links in which one file is another."""
    folder = Path(file).parent
    while folder.parts:
        (place / folder).mkdir(parents=True, exist_ok=True)
        for entry in (root / folder).iterdir():
            link = place / folder / entry.name
            if entry.name != "__pycache__" and not link.exists() and str(folder) not in SHELVES:
                link.symlink_to(entry)
        folder = folder.parent
    (place / file).unlink(missing_ok=True)
    (place / file).write_bytes(source)
    before = os.environ.get("PYTHONPATH", "")
    shelf = str(place / Path(file).parts[0])
    sys.path.insert(0, shelf)  # some tests pass it on
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [shelf, before]))
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


class OneModule(MetaPathFinder):
    """Finds one module at another path than its own."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path)
