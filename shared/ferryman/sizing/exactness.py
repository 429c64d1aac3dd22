"""The level of exactness that a worker holds, and the arithmetic that its state manifest names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from ferryman.cache.manifest import ANY_ARITHMETIC, Arithmetic, Exactness
from ferryman.errors import ConfigError
from ferryman.model.config import load_config, load_format
from ferryman.model.shapes.attention_shapes import IndexShape
from ferryman.model.shapes.delta_shapes import DeltaShape
from ferryman.model.shapes.model_shapes import StateShape
from ferryman.model.shapes.recurrent_shapes import LightningShape, MambaShape
from ferryman.model.weights.named_weights import FLOATS, torch_dtype
from ferryman.settings.engine import EngineOptions
from ferryman_kernels.cpu.arithmetic import has_one_order, kernel_revision, processor_class

_SCANNED = "a scan adds a prompt's tokens in blocks, and drawn ones one by one"
_OF_TWO_ORDERS: Mapping[type[StateShape], str] = {
    IndexShape: "a sparse index scores a drawn token by another product than a prompt's",
    MambaShape: _SCANNED,
    DeltaShape: _SCANNED,
    LightningShape: _SCANNED,
}
"""The layers that have no one order of sums yet, by what they keep, and why."""

# Models decide the order of kernels, and so the bits as well.
_MODELS = Path(__file__).parents[1] / "model"


def arithmetic_of(options: EngineOptions) -> str:
    """The arithmetic of a worker with complete options, as its manifest has it: ANY_ARITHMETIC
    where bits are not promised. Raises ConfigError, saying why, where they are asked for and
    cannot be."""
    if options.exactness == Exactness.VALUES.value:
        return ANY_ARITHMETIC
    hindrance = next(_hindrances(options), "")
    if hindrance and options.exactness == Exactness.BITS.value:
        raise ConfigError(
            f"exactness=bits: {hindrance}; leave it out, or say values, and answers are called so"
        )
    if hindrance:
        return ANY_ARITHMETIC
    loops = processor_class(torch_dtype(options.dtype))
    revision = kernel_revision(_MODELS)
    return str(Arithmetic("cpu", loops, options.dtype, revision, options.tp_size))


def _hindrances(options: EngineOptions) -> Iterator[str]:
    """The reasons why equal bits are not promised. Each goes when its path has one order."""
    if options.is_on_card:
        yield "on a card no order of sums has been measured yet"
    if not has_one_order(torch_dtype(options.dtype)):
        yield f"torch multiplies {options.dtype} on this processor, in no order of its own"
    if load_format(options.model, options.quantize) != FLOATS:
        yield "products with quantised weights depend on the number of tokens of a step"
    if options.kv_dtype != "auto":
        yield f"keys and values in {options.kv_dtype} are not held to it"
    for shape in chain.from_iterable(load_config(options.model).states):
        if type(shape) in _OF_TWO_ORDERS:
            yield _OF_TWO_ORDERS[type(shape)]
