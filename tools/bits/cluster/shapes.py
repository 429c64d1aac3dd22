"""The clusters that ways take: their workers, the plane of their hand-offs, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from tests.harness.cluster import FAST_PLANE, ClusterShape
from tests.planes import CHOICES
from tools.bits.measured_engine import DTYPES
from tools.bits.models import PAGE_SIZE, BitsModel
from tools.bits.ways import companions

from ferryman.cache.capacity import Concurrency, bytes_for, tracking_slots
from ferryman.cache.manifest import StateManifest
from ferryman.wire.plane_values import GRPC

MAX_RUNNING = 32
MEMORY_BYTES = 1 << 30
HOST_PAGES = 2_048
"""A host has room for so many pages and states. An arena of a size for all models would have a
million of a tiny one's, and take half a minute to lay out."""
SCARCE_RESERVED = 8
NUM_COMPANIONS = 6
AHEAD_TOKENS = 128
"""Where pages are scarce, so many answers beside find room for so many tokens."""
PATIENT: Mapping[str, Any] = {
    "prefetch_threshold": PAGE_SIZE,
    "prefetch_policy": "wait_complete",
}
"""A worker takes what a tier has, however long that takes."""


class ServingShape(Enum):
    """A cluster by its name. The host-cache of a second node keeps what was computed there."""

    PAIR = "a prefill and a decode worker, with the fast plane"
    PAIR_BY_GRPC = "the same with gRPC"
    SCARCE = "the same, whose decode worker has too few pages"
    BOTH = "a worker that does both"


def cluster_shape(shape: ServingShape, model: BitsModel, dtype: str) -> ClusterShape:
    """The cluster whose workers serve a model in one of DTYPES."""
    roomy = _roomy(shape, dtype)
    manifest = roomy.manifest_of(model.folder)
    host_memory = HOST_PAGES * sum(layout.slot_bytes for layout in manifest.layouts)
    changes = {"hostcache": {**roomy.settings["hostcache"], "host_memory": host_memory}}
    if shape is ServingShape.SCARCE:
        changes["decode"] = {
            **roomy.settings["decode"],
            "max_running": NUM_COMPANIONS + len(model.prompts),
            "max_reserved": SCARCE_RESERVED,
            "memory_bytes": scarce_bytes(roomy, manifest, model),
        }
    return replace(roomy, settings={**roomy.settings, **changes})


def scarce_bytes(shape: ClusterShape, manifest: StateManifest, model: BitsModel) -> int:
    """Memory of a decode worker for AHEAD_TOKENS of each companion, and for the prompts."""
    others = companions(model.prompts, NUM_COMPANIONS)
    asked = sum(map(len, [*others, *model.prompts]))
    context = asked + NUM_COMPANIONS * AHEAD_TOKENS
    tracking = tracking_slots(prefix_cache=True, overlap=shape.overlap)
    rows = Concurrency(NUM_COMPANIONS + len(model.prompts), SCARCE_RESERVED, tracking)
    return bytes_for(manifest, rows, shape.chunk_tokens, num_full=1, context=context)


def _roomy(shape: ServingShape, dtype: str) -> ClusterShape:
    plane = GRPC if shape is ServingShape.PAIR_BY_GRPC else FAST_PLANE
    worker = {**PATIENT, "quantize": DTYPES[dtype].get("quantize", "none")}
    pair = {**worker, "planes": CHOICES[plane]}
    has_both = shape is ServingShape.BOTH
    return ClusterShape(
        num_prefill=0 if has_both else 1,
        num_decode=0 if has_both else 1,
        num_both=1 if has_both else 0,
        num_nodes=2 if shape is ServingShape.PAIR else 1,
        has_storage=True,
        dtype=DTYPES[dtype]["dtype"],
        max_running=MAX_RUNNING,
        memory_bytes=MEMORY_BYTES,
        settings={
            "prefill": pair,
            "decode": {**pair, "max_reserved": MAX_RUNNING},
            "both": worker,
            "hostcache": {"prefetch_share": 1.0},
            # A worker that was killed is awaited until the next one has come.
            "router": {"no_worker_seconds": 240.0},
        },
    )
