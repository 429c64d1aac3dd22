"""Times the tiles that a kernel could have, on a card, at shapes of published models.

    python tools/tune_kernels.py                 every kernel with a table of tiles
    python tools/tune_kernels.py experts         experts, codes, decode, prefill, mamba or delta

Kernels are compiled by several processes first, then timed by one. Prints the best tiles of each
shape, beside the time of the tiles in the table, and the time of a copy of the bytes that must be
read. Tables are changed by hand: the best tiles of one shape may be bad ones for another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that it runs as a plain script

from tools.card_timer import copy_rate, seconds_on_card
from tools.tuned_cases import KERNELS, TunedCase

SHOWN = 3


def compile_part(kernel: str, part: int, parts: int) -> None:
    """Runs every `parts`-th value once: what is compiled is found by other processes."""
    number = 0
    for case in KERNELS[kernel]():
        run, _ = next(iter(case.calls.values()))
        for value in case.values:
            number += 1
            if number % parts == part:
                _try(case, value, run)
    torch.cuda.synchronize()


def _try(case: TunedCase, value: Any, run: Callable[[], object]) -> bool:
    """False for tiles that do not fit the card."""
    from triton.runtime.errors import OutOfResources

    try:
        with case.patched(value):
            run()
    except OutOfResources:
        return False
    return True


def time_case(case: TunedCase, rate: float) -> None:
    for name, (run, num_bytes) in case.calls.items():
        timed = []
        for value in case.values:
            if _try(case, value, run):
                with case.patched(value):
                    timed.append((seconds_on_card(run, 9), value))
        timed.sort(key=lambda each: each[0])
        with case.patched(None):
            now = seconds_on_card(run, 9)
        best = "; ".join(f"{took * 1e6:.1f} {_shown(value)}" for took, value in timed[:SHOWN])
        least = num_bytes / rate
        print(
            f"{case.name} · {name}: now {now * 1e6:.1f} µs, bytes {least * 1e6:.1f}; {best}",
            flush=True,
        )


def _shown(value: Any) -> str:
    plain = (value[0], *value[1]) if isinstance(value[1], tuple) else tuple(value)
    return "/".join(map(str, plain))


def compile_all(kernels: Sequence[str], num_compilers: int) -> None:
    """By processes, each with its part of the values."""
    command = [sys.executable, __file__, *kernels, "--compilers", str(num_compilers), "--part"]
    compilers = [subprocess.Popen([*command, str(part)]) for part in range(num_compilers)]
    if any(tuple(each.wait() for each in compilers)):
        sys.exit("a compiler failed")


def time_all(kernels: Sequence[str]) -> None:
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: a copy {rate / 1e9:.0f} GB/s", flush=True)
    for kernel in kernels:
        for case in KERNELS[kernel]():
            time_case(case, rate)


def _kernel(name: str) -> str:
    if name not in KERNELS:
        raise argparse.ArgumentTypeError(f"{name}: known are {', '.join(KERNELS)}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernels", nargs="*", type=_kernel, default=list(KERNELS))
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--compilers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    chosen = parser.parse_args()
    if chosen.part >= 0:
        for kernel in chosen.kernels:
            compile_part(kernel, chosen.part, chosen.compilers)
        return
    compile_all(chosen.kernels, chosen.compilers)
    time_all(chosen.kernels)


if __name__ == "__main__":
    main()
