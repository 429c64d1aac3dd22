"""Compiled loops on disk, a file for each function, source, processor and types of arguments.

numba's own cache numbers its files and keeps the numbers in an index. Two processes that compile at
the same time read the same index and give one number twice: the file of one is then found under
the types, or the processor, of the other, and a loop reads memory in another way than it lies
there, in every later process. Here the name of a file is a digest of what it was compiled for, and
there is no index.

A file that cannot be read is compiled anew, and one that cannot be written is left out: a damaged
or a full disk costs time, never an answer.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

try:
    import numba
    from numba.core.caching import FunctionCache
    from numba.core.serialize import dumps
except ModuleNotFoundError:
    numba = None


log = logging.getLogger(__name__)
compiling = logging.getLogger("ferryman_kernels.compiling")
"""Hears the name of each loop whose compilation begins, here or in a process that this one waits
for: at a first start that takes a while."""
_DIGEST_BYTES = 32


def shown_name(function: Callable[..., Any]) -> str:
    """The name of a compiled loop for people, without the digest of the sources."""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__.rpartition('_')[0]}"


@cache
def digest_of_sources(folder: Path) -> str:
    """The digest of all Python files below a folder, in hex digits."""
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class LoopFiles:
    """The files of numba's cache; `source` changes whenever the function's file does."""

    def __init__(self, folder: Path, name: str, source: Any) -> None:
        self._folder, self._name, self._source = folder, name, source

    def save(self, key: Any, data: Any) -> None:
        content = dumps(data)
        path = self._path(key)
        # Under a name of its own until it is whole: other processes may be reading.
        unfinished = path.with_suffix(f".{uuid4().hex[:16]}.tmp")
        try:
            unfinished.write_bytes(sha256(content).digest() + content)
            os.replace(unfinished, path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def load(self, key: Any) -> Any:
        """The data of `key`; None if there is none, or none that is whole."""
        try:
            found = self._path(key).read_bytes()
        except OSError:
            return None
        content = found[_DIGEST_BYTES:]
        whole = found[:_DIGEST_BYTES] == sha256(content).digest()
        return pickle.loads(content) if whole else None

    def _path(self, key: Any) -> Path:
        made_for = repr((numba.__version__, self._source, key))
        return self._folder / f"{self._name}.{sha256(made_for.encode()).hexdigest()[:32]}.nbc"


if numba is not None:

    class LoopCache(FunctionCache):  # type: ignore[misc]
        """numba's cache of a function, with files of ours in the folder that numba chooses."""

        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)
            stamp = self._impl.locator.get_source_stamp()
            self._cache_file = LoopFiles(Path(self.cache_path), self._impl.filename_base, stamp)
            self._shown_as = shown_name(function)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = super().load_overload(sig, target_context)
            if found is None:
                compiling.info("%s", self._shown_as)
            return found

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except OSError as error:
                log.warning("a compiled loop is not kept, each start compiles it: %s", error)


def cached(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """numba's compiler of `function`, which keeps what it compiles on disk where it may."""
    compiler = numba.njit(**options)(function)
    try:
        compiler._cache = LoopCache(function)
    except RuntimeError:  # no folder is writable for the cache
        pass
    return compiler
