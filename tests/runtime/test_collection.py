"""Collections in a service: none while it imports, and later none of what the start made."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from ferryman.runtime.collection import importing, keep_start

class Ring:
    def __init__(self):
        self.own = self

def rings():
    return sum(isinstance(found, Ring) for found in gc.get_objects())

keep_start()
assert not gc.get_freeze_count()
with importing():
    ran = [generation["collections"] for generation in gc.get_stats()]
    early = [Ring() for _ in range(10_000)]
    assert ran == [generation["collections"] for generation in gc.get_stats()]
assert gc.isenabled() and not rings() and gc.get_freeze_count() > 10_000
started = Ring()
keep_start()
assert not rings()
late = Ring()
del late
assert gc.collect() and not rings()
print("kept")
"""


def test_imports_and_the_start_are_not_looked_at_and_later_garbage_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "kept\n", done.stderr
