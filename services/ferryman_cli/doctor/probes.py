"""Orders to the processes of a cluster: to say what they are, and to move bytes to each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ferryman.errors import FerrymanError, InvalidRequest
from ferryman.wire.grpc.peer_probe import PROBE_SECONDS
from ferryman.wire.nats.heartbeat import DECODE, PREFILL, Heartbeat
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.signed_orders import RouterSignatures
from ferryman_cli.doctor.fault_report import DoctorFinding

ABOUT_SECONDS = 10.0
ANSWER_SECONDS = PROBE_SECONDS + 2.0
MAX_PAIRS = 64
"""Each pair moves 2 MiB."""


@dataclass(frozen=True, slots=True)
class AboutAnswer:
    """The answer of a process to `about`, when the order was given (seconds since 1970), and how
    long it took. `facts` is None without an answer, and `error` says why."""

    beat: Heartbeat
    asked_at: float
    seconds: float
    facts: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Orders:
    """Gives orders as a router of the cluster."""

    bus: NatsBus
    subjects: Subjects
    signatures: RouterSignatures

    async def about(self, beats: Iterable[Heartbeat], clock: Any) -> list[AboutAnswer]:
        """The answers of all processes, asked at once."""
        return list(await asyncio.gather(*(self._about(beat, clock) for beat in beats)))

    async def probe_findings(self, beats: Iterable[Heartbeat]) -> list[DoctorFinding]:
        """Moves bytes between each two workers that may hand off to each other, both ways."""
        peers: dict[str, list[Heartbeat]] = {}
        senders = {beat.worker_id: beat for beat in beats}
        for sender, peer in islice(pairs_of(senders.values()), MAX_PAIRS):
            peers.setdefault(sender.worker_id, []).append(peer)
        # A process obeys one order after the other: what waits there would count as slow.
        tried = await asyncio.gather(
            *(self._probe_each(senders[name], of_sender) for name, of_sender in peers.items())
        )
        return [finding for findings in tried for finding in findings]

    async def _probe_each(
        self, sender: Heartbeat, peers: Iterable[Heartbeat]
    ) -> list[DoctorFinding]:
        tried = [await self._probe(sender, peer) for peer in peers]
        return [finding for finding in tried if finding is not None]

    async def _about(self, beat: Heartbeat, clock: Any) -> AboutAnswer:
        subject, asked_at = self.subjects.control(beat.worker_id, "about"), clock()
        try:
            payload = await self.bus.request(subject, b"", timeout_seconds=ABOUT_SECONDS)
        except InvalidRequest as error:  # an older version knows no such order
            return AboutAnswer(
                beat, asked_at, clock() - asked_at, {"version": "an older one"}, str(error)
            )
        except FerrymanError as error:
            return AboutAnswer(beat, asked_at, clock() - asked_at, None, str(error))
        return AboutAnswer(beat, asked_at, clock() - asked_at, json.loads(payload))

    async def _probe(self, sender: Heartbeat, peer: Heartbeat) -> DoctorFinding | None:
        subject = self.subjects.control(sender.worker_id, "probe")
        signature = self.signatures.probe(peer.address, sender.worker_id).hex()
        order = json.dumps({"address": peer.address, "signature": signature}).encode()
        try:
            answer = json.loads(
                await self.bus.request(subject, order, timeout_seconds=ANSWER_SECONDS)
            )
        except FerrymanError as error:
            return _blocked(sender, peer, str(error))
        if not answer["is_same"]:
            return _blocked(sender, peer, "other bytes came back than were sent")
        return None


def pairs_of(beats: Iterable[Heartbeat]) -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Each ordered pair of two workers that are ready, those that hand off most first."""
    workers = [beat for beat in beats if beat.is_ready and is_worker(beat)]
    pairs = [(sender, peer) for sender in workers for peer in workers if sender is not peer]
    # Prompts go from prefill to decode.
    return iter(
        sorted(pairs, key=lambda pair: not (pair[0].serves(PREFILL) and pair[1].serves(DECODE)))
    )


def is_worker(beat: Heartbeat) -> bool:
    return beat.serves(PREFILL) or beat.serves(DECODE)


def _blocked(sender: Heartbeat, peer: Heartbeat, why: str) -> DoctorFinding:
    host, _, port = peer.address.rpartition(":")
    return DoctorFinding(
        "bulk-plane",
        f"{sender.worker_id} cannot move 1 MiB to {peer.worker_id} and back: {why}",
        f"let {host}:{port} be reached from the machine of {sender.worker_id} (nc -vz {host}"
        f" {port}), or set FERRYMAN_ADVERTISE of {peer.worker_id} to an address that can",
    )
