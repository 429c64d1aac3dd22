"""The level of exactness that a worker holds, and the arithmetic that its state manifest names."""

from __future__ import annotations

from pathlib import Path

from ferryman.cache.manifest import ANY_ARITHMETIC, Arithmetic, Exactness
from ferryman.errors import ConfigError
from ferryman.model.weights.named_weights import torch_dtype
from ferryman.settings.engine import EngineOptions
from ferryman_kernels.cpu.arithmetic import has_one_order, kernel_revision, processor_class

# Models decide the order of kernels, and so the bits as well.
_MODELS = Path(__file__).parents[1] / "model"


def arithmetic_of(options: EngineOptions) -> str:
    """The arithmetic of a worker with complete options, as its manifest has it: ANY_ARITHMETIC
    where bits are not promised. Raises ConfigError, saying why, where they are asked for and
    cannot be."""
    if options.exactness == Exactness.VALUES.value:
        return ANY_ARITHMETIC
    hindrance = _hindrance(options)
    if hindrance and options.exactness == Exactness.BITS.value:
        raise ConfigError(
            f"exactness=bits: {hindrance}; leave it out, or say values, and answers are called so"
        )
    if hindrance:
        return ANY_ARITHMETIC
    loops = processor_class(torch_dtype(options.dtype))
    revision = kernel_revision(_MODELS)
    return str(Arithmetic("cpu", loops, options.dtype, revision, options.tp_size))


def check_audit(options: EngineOptions) -> None:
    """Raises ConfigError for an audit where equal tokens may have other bits: sound state would
    differ from state that is computed again, and every audit would raise a false alarm."""
    if not options.audit_share:
        return
    chosen = "exactness=values" if options.exactness == Exactness.VALUES.value else ""
    if reason := chosen or _hindrance(options):
        raise ConfigError(f"audit_share={options.audit_share:g}: {reason}; leave out the audit")


def _hindrance(options: EngineOptions) -> str:
    """The reason why equal bits are not promised, or empty. Each goes when its path has one
    order."""
    if options.is_on_card:
        return "on a card no order of sums has been measured yet"
    if not has_one_order(torch_dtype(options.dtype)):
        return f"torch multiplies {options.dtype} on this processor, in no order of its own"
    return ""
