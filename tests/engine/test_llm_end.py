"""The offline engine ends with its process, also for a caller that never closes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tiny_models import save_tiny_model

UNCLOSED = """
import atexit, sys, threading

def working():
    return sorted(one.name for one in threading.enumerate() if one.name.endswith("-stream"))

# Runs after what is registered later: when an engine that ends with its process has ended.
atexit.register(lambda: print("left", working()))
from ferryman.llm import LLM
llm = LLM(sys.argv[1], dtype="float32", page_size=16, memory_bytes=32 << 20)
print("began", working())
"""


def test_an_engine_that_nobody_closes_ends_before_its_process(tmp_path: Path) -> None:
    """A thread that works while the interpreter ends can abort the process."""
    save_tiny_model(tmp_path, "bamba")
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split("\n")[:2] == ["began ['copy-stream', 'forward-stream']", "left []"]
