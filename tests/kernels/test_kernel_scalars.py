"""Numbers that Triton's kernels take as arguments."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

import ferryman_kernels
from ferryman_kernels._triton import Kernel


def all_kernels() -> dict[str, Kernel]:
    """The kernels of the package by name."""
    found = {}
    for module in pkgutil.walk_packages(ferryman_kernels.__path__, "ferryman_kernels."):
        for value in vars(import_module(module.name)).values():
            if isinstance(value, Kernel):
                found[value._function.__name__] = value
    return found


def test_no_kernel_that_computes_in_float64_takes_a_float() -> None:
    """Triton makes a float32 of a Python float that is an argument, and 1e-5 then differs in its
    eighth digit. A constant becomes a number of the type that it is computed with. The interpreter
    keeps all digits of both, so values do not show it."""
    signatures = {
        name: inspect.signature(kernel._function).parameters
        for name, kernel in all_kernels().items()
    }
    wide = {name for name, parameters in signatures.items() if "WIDE" in parameters}
    floats = {
        name
        for name, parameters in signatures.items()
        if any(parameter.annotation == "float" for parameter in parameters.values())
    }
    assert {"_rms_norm_kernel", "_add_rms_norm_kernel"} <= wide
    assert floats, "attention has scores of float32 alone, and takes its scale"
    assert not wide & floats
