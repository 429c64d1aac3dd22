"""Launches of compiled loops as values, for a caller that runs the same ones again.

A loop is told addresses, so a launch can be repeated as long as the memory at them lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class RecordedLaunch(NamedTuple):
    """A call, complete: `run(*args)` does the same again. `loop` is the compiled function that it
    calls with these arguments, None of a call of anything else."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    loop: Any = None


Listener = Callable[[RecordedLaunch], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
for_many_tokens: ContextVar[bool] = ContextVar("for_many_tokens", default=False)
"""Whether few tokens go through the loops that many do."""


@contextmanager
def launches_told_to(listener: Listener) -> Iterator[None]:
    """Tells `listener` of each loop that this thread has launched, until the end of the `with`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def loops_for_many_tokens() -> Iterator[None]:
    """Has this thread compute few tokens as it would many, until the end of the `with`: loops are
    shared among threads, and products copy their inputs. So a short step compiles and loads the
    loops of a long one. Results have the same bits."""
    token = for_many_tokens.set(True)
    try:
        yield
    finally:
        for_many_tokens.reset(token)


def launch(loop: Any, run: Callable[..., Any], *args: Any) -> None:
    """Runs a compiled loop by `run`, and tells of it."""
    run(*args)
    listener = _listener.get()
    if listener is not None:
        listener(RecordedLaunch(run, args, loop))
