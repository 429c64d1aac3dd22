"""Compiles every Triton kernel for a Hopper GPU, on a machine that need not have one.

    python tools/compile_kernels.py                     some shapes in bfloat16 and float32
    python tools/compile_kernels.py bfloat16 published  every published shape too (minutes)

Each launcher runs on CPU tensors of real sizes. Its kernels are not launched but compiled for
sm_90, as on such a GPU, and assembled. The table shows their resources and whether registers spill.
It fails on more shared memory than a block of Hopper has, and on more spilled bytes than 256.
(The interpreter accepts kernels that the compiler refuses, so the tests run this too.)
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ferryman_kernels._triton import Kernel

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
ALIGNED = [["tt.divisibility", 16]]
MAX_SHARED_BYTES = 227 * 1024
MAX_SPILLED_BYTES = 256

_built: set[str] = set()
_refused: list[str] = []


def compile_kernel(kernel: Kernel, *args: Any, **constants: Any) -> None:
    """Compiles a kernel as a launch with these arguments would, and prints a line."""
    options = {"ptx_version": 88}  # the version that Triton's own assembler for Hopper reads
    for name in {"num_warps", "num_stages"} & constants.keys():
        options[name] = constants.pop(name)
    function = JITFunction(kernel.function)
    given = dict(zip(function.arg_names, args, strict=False)) | constants
    signature, attributes, fixed = {}, {}, dict[str, Any]()
    for index, parameter in enumerate(function.params):
        value = given[parameter.name]
        is_any = parameter.name in kernel.any_of
        signature[parameter.name] = _type_of(value, parameter.is_constexpr, is_any)
        if signature[parameter.name] == "constexpr":
            fixed[parameter.name] = value
        elif isinstance(value, Tensor) or _is_round(value, is_any):
            attributes[index,] = ALIGNED
    source = ASTSource(function, signature, fixed, attributes)
    key = repr((kernel.function.__name__, signature, attributes, fixed, options))
    if key in _built:
        return
    _built.add(key)
    built = triton.compile(source, target=HOPPER, options=options)
    registers, spilled = _assemble(built.asm["ptx"])
    shared = built.metadata.shared
    line = f"{kernel.function.__name__:32} {registers:3} registers, {spilled:4} bytes spilled"
    print(f"{line}, {shared} bytes shared, {built.metadata.num_warps} warps", flush=True)
    if shared > MAX_SHARED_BYTES or spilled > MAX_SPILLED_BYTES:
        _refused.append(f"{line}, {shared} bytes shared: {fixed}")


def _type_of(value: Any, is_constexpr: bool, is_any: bool) -> str:
    if is_constexpr or (isinstance(value, int) and value == 1 and not is_any):
        return "constexpr"
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    return "fp32" if isinstance(value, float) else "i32"


def _is_round(value: Any, is_any: bool) -> bool:
    """Whether Triton compiles a kernel for a multiple of 16 here."""
    return isinstance(value, int) and value % 16 == 0 and not is_any


def _assemble(ptx: str) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(PTXAS), "-v", "-arch=sm_90a", str(source), "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"Used (\d+) registers|(\d+) bytes spill stores", log)
    registers = max(int(used) for used, _ in found if used)
    spilled = sum(int(spill) for _, spill in found if spill)
    return registers, spilled


@contextmanager
def compiling_for_a_gpu() -> Iterator[None]:
    """Inside the block a launch only compiles, and products keep the dtype they have on a GPU."""

    def dot_type(operand: Tensor) -> Any:
        return tl.bfloat16 if operand.dtype == torch.bfloat16 else tl.float32

    def launch(kernel: Kernel, _: tuple[int, ...]) -> Any:
        return lambda *args, **constants: compile_kernel(kernel, *args, **constants)

    with ExitStack() as patched:
        patched.enter_context(patch.object(Kernel, "__getitem__", launch))
        for module in _modules_with("dot_type"):
            patched.enter_context(patch.object(module, "dot_type", dot_type))
        yield


def _modules_with(name: str) -> list[ModuleType]:
    """The modules of kernels that have this name, imported from another or their own."""
    modules = [module for key, module in sys.modules.items() if key.startswith("ferryman_kernels.")]
    return [module for module in modules if hasattr(module, name)]


def main(words: list[str]) -> None:
    from tools import kernel_launches

    dtypes = [word for word in words if word != "published"] or ["bfloat16", "float32"]
    for name in dtypes:
        print(f"\n{name}")
        dtype = getattr(torch, name)
        with compiling_for_a_gpu():
            kernel_launches.launch_all(dtype)
            kernel_launches.launch_wide(dtype)
            if "published" in words:
                launch_published(dtype)
    if _refused:
        sys.exit("\n".join(["\nthese do not fit a Hopper GPU:", *_refused]))


def launch_published(dtype: torch.dtype) -> None:
    """The kernels of every config in tests/model/published, each shape once."""
    from tools.model_tables import published_configs
    from tools.published_launches import launches_of

    from ferryman.model.config import load_config

    launched = set()
    for published in published_configs():
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(published.write(Path(folder)))
        print(f"\n{published.model}", flush=True)
        for launch, *sizes in launches_of(config):
            if (launch, *sizes) not in launched:
                launched.add((launch, *sizes))
                launch(dtype, *sizes)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1:])
