"""The level of exactness that a worker holds, and the arithmetic that its state manifest names."""

from __future__ import annotations

from pathlib import Path

from ferryman.cache.manifest import ANY_ARITHMETIC, CARD, Arithmetic, Exactness
from ferryman.errors import ConfigError
from ferryman.model.config import family_of, load_format
from ferryman.model.weights.named_weights import FLOATS, torch_dtype
from ferryman.model.weights.weight_formats import Int8AtLoad
from ferryman.settings.engine import EngineOptions
from ferryman_kernels.cpu.arithmetic import (
    card_class,
    card_revision,
    has_one_order,
    kernel_revision,
    processor_class,
)

# torch adds up the rows of their layers: means of thousands of numbers.
_FAMILIES_WITH_MEANS = ("gemma3n",)
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
    if hindrance or _is_unasked_on_card(options):
        return ANY_ARITHMETIC
    return str(_promised(options))


def check_audit(options: EngineOptions) -> None:
    """Raises ConfigError for an audit where equal tokens may have other bits: sound state would
    differ from state that is computed again, and every audit would raise a false alarm."""
    if not options.audit_share:
        return
    reason = _hindrance(options)
    if options.exactness == Exactness.VALUES.value:
        reason = "exactness=values"
    elif not reason and _is_unasked_on_card(options):
        reason = "on a card bits are held under exactness=bits alone"
    if reason:
        raise ConfigError(f"audit_share={options.audit_share:g}: {reason}; leave out the audit")


def _promised(options: EngineOptions) -> Arithmetic:
    dtype, ranks = options.dtype, options.tp_size
    if options.is_on_card:
        return Arithmetic(CARD, card_class(options.device), dtype, card_revision(_MODELS), ranks)
    loops = processor_class(torch_dtype(dtype))
    return Arithmetic("cpu", loops, dtype, kernel_revision(_MODELS), ranks)


def _is_unasked_on_card(options: EngineOptions) -> bool:
    """On a card the kernels in one order are slower than the fastest, and neither their bits nor
    their price have been measured: nobody gets them unasked."""
    return options.is_on_card and options.exactness != Exactness.BITS.value


def _hindrance(options: EngineOptions) -> str:
    """The reason why equal bits cannot be promised, or empty. Each goes when its path has one
    order."""
    return _of_card(options) if options.is_on_card else _of_processor(options)


def _of_processor(options: EngineOptions) -> str:
    if not has_one_order(torch_dtype(options.dtype)):
        return f"torch multiplies {options.dtype} on this processor, in no order of its own"
    return ""


def _of_card(options: EngineOptions) -> str:
    if options.dtype not in ("bfloat16", "float32"):
        return f"torch multiplies {options.dtype} on a card, in no order of its own"
    if load_format(options.model, options.quantize) not in (FLOATS, Int8AtLoad()):
        return "weights that a checkpoint stores in codes have no order of their own on a card"
    if options.tp_size > 1:
        return "sums over the ranks of cards are NCCL's, whose order follows their length"
    if family_of(options.model).name in _FAMILIES_WITH_MEANS:
        return (
            "torch takes means of whole rows of this model, in an order that follows their number"
        )
    if not card_class(options.device):
        return f"there is no card {options.device} here whose arithmetic could be named"
    return ""
