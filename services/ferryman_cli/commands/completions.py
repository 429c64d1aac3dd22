"""Words that the shell may complete: names in a state folder, and the choices of a flag.

They are read from files: a broker that is away would hold up the Tab key. A mistake there is no
word, since the shell has no place for an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import typer

from ferryman_launcher.state_folder import DEFAULT, log_paths

READ_BYTES = 4 << 20  # of a log, whose ready lines stand at its begin and after restarts
_READY = '{"event": "ready"'

Complete = Callable[[str], list[str]]


def words(choices: Iterable[str]) -> Complete:
    """Completes to one of these."""
    listed = tuple(choices)

    def complete(incomplete: str) -> list[str]:
        return _beginning(listed, incomplete)

    return complete


def log_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes to the name of a log in the state folder."""
    return _beginning(log_paths(_state_dir(ctx)), incomplete)


def worker_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes to the id of a process in the state folder, as it stands in its ready line."""
    ids = (_last_id(path) for path in log_paths(_state_dir(ctx)).values())
    return _beginning(filter(None, ids), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _state_dir(ctx: typer.Context) -> Path:
    """The folder of the flag, if it stands before the word, of the environment, or the default."""
    return Path(ctx.params.get("state_dir") or DEFAULT)


def _last_id(log: Path) -> str:
    """The id in the last ready line of a log; empty for a process without one."""
    return next(reversed(list(_ids(_lines(log)))), "")


def _ids(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith(_READY):
            with suppress(ValueError):
                yield str(json.loads(line).get("worker_id", ""))


def _lines(log: Path) -> Sequence[str]:
    with suppress(OSError), log.open("rb") as file:
        return file.read(READ_BYTES).decode(errors="replace").splitlines()
    return ()
