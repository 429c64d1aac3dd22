"""The ways through a cluster, each with the proof that it was taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tests.harness.cluster import FAST_PLANE
from tools.bits.cluster.crowd_ways import batched, retracted
from tools.bits.cluster.moving_ways import decode_killed, drained, prefill_killed
from tools.bits.cluster.served_answer import ServedAnswer, Tried
from tools.bits.cluster.serving import ServedCase
from tools.bits.cluster.shapes import ServingShape
from tools.bits.cluster.tier_ways import (
    device_hit,
    hit_after_restart,
    host_hit,
    next_turn,
    peer_hit,
    storage_hit,
)
from tools.bits.compared_answer import NotTried

from ferryman.wire.plane_values import GRPC, NIXL

Take = Callable[[ServedCase], Awaitable[list[Tried]]]


@dataclass(frozen=True, slots=True)
class ServedWay:
    """A way by its name in the table, and the cluster that it takes."""

    name: str
    meaning: str
    shape: ServingShape
    take: Take


async def handed_off(plane: str, served: ServedCase) -> list[Tried]:
    if plane == NIXL and FAST_PLANE != NIXL:
        return [NotTried("NIXL is not installed", False)] * len(served.model.prompts)
    await served.forget()
    return [await _by_plane(served, each, plane) for each in await served.ask(served.model.prompts)]


async def _by_plane(served: ServedCase, answer: ServedAnswer, plane: str) -> Tried:
    taken = await served.cluster.plane_of(answer.request_id)
    return answer if taken == plane else NotTried(f"it was handed off by {taken}")


_PAIR, _BY_GRPC, _BOTH = ServingShape.PAIR, ServingShape.PAIR_BY_GRPC, ServingShape.BOTH

SERVED_WAYS: Mapping[str, ServedWay] = {
    way.name: way
    for way in (
        ServedWay("nixl", "handed off by NIXL", _PAIR, partial(handed_off, NIXL)),
        ServedWay("device", "found on prefill's device", _PAIR, device_hit),
        ServedWay("host", "loaded from the host", _PAIR, host_hit),
        ServedWay("storage", "fetched from storage", _PAIR, storage_hit),
        ServedWay("restarted", "the same, by the next host-cache", _PAIR, hit_after_restart),
        ServedWay("peer", "fetched from another node", _PAIR, peer_hit),
        *(
            ServedWay(f"turn-{n}", f"turn {n} on decode's state", _PAIR, partial(next_turn, n))
            for n in (2, 3)
        ),
        *(
            ServedWay(f"batch-{n}", f"{n} answers at once", _PAIR, partial(batched, n))
            for n in (8, 24)
        ),
        ServedWay("prefill-killed", "prefill is killed in its prompt", _PAIR, prefill_killed),
        ServedWay("decode-killed", "decode is killed in mid-answer", _PAIR, decode_killed),
        ServedWay("grpc", "handed off by gRPC", _BY_GRPC, partial(handed_off, GRPC)),
        ServedWay("drained", "decode drains in mid-answer, with state", _BY_GRPC, drained),
        ServedWay("retracted", "decode's pages run out", ServingShape.SCARCE, retracted),
        ServedWay("both", "one worker does both", _BOTH, partial(handed_off, "local")),
    )
}
"""All ways, in the order of the table's rows; those of a cluster stand together."""
