"""Says which tests a machine cannot run, and why: `python -m tools.not_tried`, a line each.

A skipped test is a letter among thousands, and a run with hundreds of them is as green as one with
none. `.ci/run` prints these lines, so that its reader knows what its green does not say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class MachineFeatures:
    """The things that decide about tests: `packages` are those of extras that are not installed."""

    has_tiles: bool
    has_vectors: bool
    has_card: bool
    missing_packages: tuple[str, ...] = ()


EXTRAS = {
    "litellm": "LiteLLM against a cluster; pip install 'ferryman[clients]' has it",
    "nixl": "hand-offs by NIXL; pip install 'ferryman[nixl]' has it",
}
"""By package: the tests that need it."""


def lines(machine: MachineFeatures) -> Iterator[str]:
    """One for each thing that is skipped here."""
    if not machine.has_vectors:
        yield "compiled loops over panels; this processor has no AVX-512"
    if not machine.has_tiles:
        held = "their loops run on tiles in numpy alone (tests/kernels/test_order_of_*.py)"
        yield f"products and attention by tiles; this processor has no AMX, and {held}"
    if not machine.has_card:
        yield "kernels, graphs and streams on a card; there is no CUDA device (pytest -m gpu)"
    for package in machine.missing_packages:
        yield EXTRAS[package]


def this_machine() -> MachineFeatures:
    """The one that this runs on."""
    import torch

    from ferryman_kernels.cpu._tiles import has_tiles
    from ferryman_kernels.products.packed_product import reads_panels

    missing = tuple(package for package in EXTRAS if find_spec(package) is None)
    return MachineFeatures(
        has_tiles(), reads_panels(torch.float32), torch.cuda.is_available(), missing
    )


if __name__ == "__main__":
    for line in lines(this_machine()):
        print(f"NOT TRIED: {line}")
