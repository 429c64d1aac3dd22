"""The engine's part of an audit: whether it computes bits that can be compared, and the comparison.

Where the order of sums follows the batch, sound state differs from state that is computed again,
and every audit would raise a false alarm. There an engine with an audit does not start.

Two slots of one kind are compared byte by byte. A page counts as far as its positions are computed,
and no byte between sections counts. A recurrent slot counts as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ferryman.cache.manifest import DTYPE_BYTES, KindLayout, Section, StateManifest
from ferryman.engine.memory.transfer import Transfer
from ferryman.errors import ConfigError
from ferryman.schedule.events import AuditPair, HeldUnit
from ferryman.settings.engine import EngineOptions
from ferryman_kernels.products.packed_product import reads_panels

Bytes = NDArray[np.uint8]

_RECURRENT = "the sums of this model's recurrent layers follow the cut of its prompts"
_WHY = {
    "ssm": _RECURRENT,
    "conv": _RECURRENT,
    "index": "the choice of this model's sparse attention follows the cut of its prompts",
}
"""The parts of state, by the names of their sections, that have no order of sums of their own."""


def check_audit(options: EngineOptions, manifest: StateManifest) -> None:
    """Raises ConfigError for an audit at a level where equal tokens may have other bits."""
    if options.audit_share and (reason := why_not_bits(options, manifest)):
        raise ConfigError(f"audit_share={options.audit_share:g}: {reason}; leave out the audit")


def why_not_bits(options: EngineOptions, manifest: StateManifest) -> str:
    """The reason why the same tokens may have other bits when they are computed in another way;
    empty if they have the same."""
    if options.dtype == "float64":
        return "float64 is exact to 1e-14 and not to the bit (bfloat16 and float32 are)"
    if options.is_on_card:
        return "on a card the order of sums follows the batch"
    if not reads_panels(getattr(torch, options.dtype)):
        return f"without AVX-512 this processor's products in {options.dtype} follow the batch"
    return next((_WHY[name] for name in _sections(manifest) if name in _WHY), "")


def _sections(manifest: StateManifest) -> Iterator[str]:
    for layout in manifest.layouts:
        yield from (section.name.partition(".")[0] for section in layout.sections)


@dataclass(frozen=True, slots=True)
class UnitDifference:
    """The first unit that differs, and the first of its sections that does. The digests are of all
    bytes that count: as they were served, and as they were computed again. `num_units` differ."""

    unit: HeldUnit
    section: Section
    served: bytes
    cold: bytes
    num_units: int = 1


def first_difference(
    manifest: StateManifest, transfer: Transfer, pairs: Iterable[AuditPair]
) -> UnitDifference | None:
    """The first unit whose bytes are not those computed again; None if all are equal."""
    differences = [
        difference for pair in pairs if (difference := _difference(manifest, transfer, pair))
    ]
    return replace(differences[0], num_units=len(differences)) if differences else None


def _difference(
    manifest: StateManifest, transfer: Transfer, pair: AuditPair
) -> UnitDifference | None:
    unit, layout = pair.unit, manifest.layout(pair.unit.kind)
    served = np.frombuffer(transfer.read(unit.kind, unit.handle.slot), np.uint8)
    cold = np.frombuffer(transfer.read(unit.kind, pair.cold.slot), np.uint8)
    if np.array_equal(served, cold):
        return None
    for section in layout.sections:
        counted = _counted(section, served, unit.num_tokens)
        if not np.array_equal(counted, _counted(section, cold, unit.num_tokens)):
            digests = [_digest(layout, content, unit.num_tokens) for content in (served, cold)]
            return UnitDifference(unit, section, digests[0], digests[1])
    return None


def _counted(section: Section, content: Bytes, num_tokens: int) -> Bytes:
    """The bytes of a section that count: of the first `num_tokens` positions; 0 for all of it."""
    part = content[section.offset : section.offset + section.num_bytes]
    if not num_tokens:
        return part
    shaped = part.reshape(*section.shape, DTYPE_BYTES[section.dtype])
    # Where ranks share the heads, those come before the positions.
    is_by_head = section.shard_axis == 0 and len(section.shape) > 1
    return shaped[:, :num_tokens] if is_by_head else shaped[:num_tokens]


def _digest(layout: KindLayout, content: Bytes, num_tokens: int) -> bytes:
    digest = xxhash.xxh3_128()
    for section in layout.sections:
        digest.update(np.ascontiguousarray(_counted(section, content, num_tokens)).data)
    return digest.digest()
