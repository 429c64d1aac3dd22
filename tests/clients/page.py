"""The examples of docs/clients.md, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_TEXT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
_ADDRESS = "http://127.0.0.1:8000/v1"
SUM = "17 + 15 = 32."  # the answer to the question of every example


def block(client: str, language: str, base_url: str) -> str:
    """The block of a language in a client's section, with the address of a running cluster."""
    section = _TEXT.partition(f"\n## {client}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found).replace(_ADDRESS, base_url)


def printed(client: str, base_url: str) -> str:
    """All that the Python block of a client prints, in a process of its own."""
    command = [sys.executable, "-c", block(client, "python", base_url)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
