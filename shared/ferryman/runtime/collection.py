"""A service looks for cyclic garbage not while it imports, and never in what its start made.

A full collection walks every object that Python tracks, 300,000 of them in a worker, and holds the
event loop and all threads of Python for 170 ms. Modules, settings and pools live as long as the
process, so nothing is found there. Imports alone set off collections for a fifth of their time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Imports a service without collections; what they made is kept."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_start() -> None:
    """Collections look at nothing that is here now; what comes later is collected as ever.

    Only in a process that began with `importing`: another one, such as a test run, is not a service
    alone, and wants its garbage found.
    """
    if gc.get_freeze_count():
        gc.freeze()
