"""Number formats that a processor multiplies by itself, as /proc/cpuinfo lists them (proc(5))."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# Instructions that multiply bfloat16: AVX-512 BF16 and AMX of x86, BF16 of Arm.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the processor that /proc/cpuinfo describes multiplies bfloat16 by itself."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not BFLOAT16_FLAGS.isdisjoint(words.split())
    return False


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor of this machine has instructions for bfloat16."""
    try:
        return has_bfloat16(Path("/proc/cpuinfo").read_text())
    except OSError:
        return False
