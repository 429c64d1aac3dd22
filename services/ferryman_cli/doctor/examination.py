"""All checks in order: the machine and the model folder, then the cluster, if there is one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ferryman.errors import PermissionDenied, Unavailable
from ferryman.security.credentials import Login, RoleCredentials
from ferryman.security.shown_urls import without_logins
from ferryman.settings.cluster import UpOptions
from ferryman.wire.grpc.role_tokens import GrpcAccess
from ferryman.wire.nats.connection import NatsOptions
from ferryman.wire.nats.heartbeat import HEARTBEAT_SECONDS
from ferryman.wire.nats.nats_bus import NatsBus
from ferryman.wire.nats.subjects import Subjects
from ferryman.wire.signed_orders import RouterSignatures
from ferryman_cli.doctor.broker import log_findings, reached_broker, unreached_finding
from ferryman_cli.doctor.fault_report import DoctorReport
from ferryman_cli.doctor.fleet import (
    SERVERS,
    answer_findings,
    beat_findings,
    clock_findings,
    state_findings,
    unheard_findings,
)
from ferryman_cli.doctor.index import look_at_index
from ferryman_cli.doctor.machine import (
    disk_findings,
    limit_findings,
    memory_findings,
    port_findings,
    secret_findings,
)
from ferryman_cli.doctor.model_folder import change_findings, folder_findings
from ferryman_cli.doctor.probes import AboutAnswer, Orders
from ferryman_cli.doctor.processes import arena_findings, door_findings, process_findings
from ferryman_cli.lifecycle_reader import heard_beats
from ferryman_cli.running.status import process_status
from ferryman_launcher.checks.model_places import ModelPlaces
from ferryman_launcher.state_folder import RunningCluster

LISTEN_SECONDS = 2.0 * HEARTBEAT_SECONDS
# So long for processes that are known to run: on a busy machine a beat may be late.
PATIENCE_SECONDS = 10.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Patient:
    """The subject of an examination. `options` and `places` are those of a start, `model` is a
    folder. Without a running cluster `broker` is None. `state_dir` may not exist. `credentials` are
    a router's, or None where orders cannot be given."""

    options: UpOptions
    places: ModelPlaces
    model: Path
    state_dir: Path
    cluster: RunningCluster | None = None
    broker: NatsOptions | None = None
    redis_url: str = ""
    cluster_name: str = "local"
    credentials: RoleCredentials | None = None
    authorities: Callable[[], bytes] | None = None
    clock: Clock = field(default=time.time)

    @property
    def redis_login(self) -> Login | None:
        return self.credentials.redis if self.credentials else None

    @property
    def folders(self) -> list[Path]:
        """The folders on whose disks a cluster writes."""
        tiers = self.options.tiers
        is_folder = bool(tiers.storage_dir) and not tiers.has_storage_url
        return [self.state_dir, *([Path(tiers.storage_dir)] if is_folder else [])]


async def examine(patient: Patient) -> DoctorReport:
    """Makes all checks that the patient allows."""
    examination = DoctorReport()
    _examine_machine(patient, examination)
    if patient.cluster is not None:
        cluster = patient.cluster
        examination.take("processes", list(process_findings(cluster)))
        examination.take("doors", await asyncio.to_thread(lambda: list(door_findings(cluster))))
        changed = change_findings(cluster.model_folder, cluster.model_files)
        examination.take("loaded model", list(changed))
    await _examine_cluster(patient, examination)
    return examination


def _examine_machine(patient: Patient, examination: DoctorReport) -> None:
    options = patient.options
    examination.take("limits", list(limit_findings()))
    examination.take("disks", list(disk_findings(patient.folders)))
    examination.take("secrets", list(secret_findings(patient.state_dir)))
    examination.take("model", list(folder_findings(patient.model, patient.places)))
    if patient.broker is not None:
        return  # the cluster has its ports and its memory
    examination.take("ports", list(port_findings(options)))
    if not any(finding.name in ("model", "weights") for finding in examination.findings):
        examination.take("memory", list(memory_findings(options, patient.places)))


async def _examine_cluster(patient: Patient, examination: DoctorReport) -> None:
    if patient.broker is None:
        examination.leave_out("cluster", "none runs here, and no --nats names one")
        return
    if patient.redis_url:
        index = await look_at_index(patient.redis_url, patient.redis_login, patient.authorities)
        clock = clock_findings("Redis", index.clock, patient.clock()) if index.clock else ()
        examination.take("Redis", [*index.findings, *clock])
    else:
        examination.leave_out("Redis", "no --redis names it")
    await _examine_by_broker(patient, patient.broker, examination)


async def _examine_by_broker(
    patient: Patient, options: NatsOptions, examination: DoctorReport
) -> None:
    try:
        async with reached_broker(options) as bus:
            state = await bus.log_state()
            clock = clock_findings("NATS", state.clock, patient.clock()) if state.clock else ()
            examination.take("NATS", [*log_findings(state, without_logins(options.url)), *clock])
            await _examine_fleet(patient, bus, examination)
    except (PermissionDenied, Unavailable) as error:
        examination.take("NATS", [unreached_finding(options, error)])


async def _examine_fleet(patient: Patient, bus: NatsBus, examination: DoctorReport) -> None:
    subjects = Subjects(patient.cluster_name)
    expected = _num_beating(patient.cluster)
    beats, starts = await heard_beats(
        bus, subjects, LISTEN_SECONDS, expected=expected, patience_seconds=PATIENCE_SECONDS
    )
    ready = [beats[name] for name in sorted(beats)]
    examination.take("state", list(state_findings(ready)))
    examination.take("heartbeats", list(beat_findings(ready, starts, beats)))
    if patient.credentials is None and bus.statistics().num_forbidden == 0 and not ready:
        examination.leave_out("orders", "no process was heard")
        return
    orders = Orders(bus, subjects, RouterSignatures(GrpcAccess(patient.credentials)))
    answers = await orders.about(ready, patient.clock)
    if patient.credentials is None and all(answer.facts is None for answer in answers):
        examination.leave_out(
            "versions, clocks, bulk planes", "orders need --credentials router.json"
        )
        return
    examination.take("versions, clocks", list(answer_findings(answers)))
    if patient.cluster is not None:
        _examine_named(patient.cluster, answers, examination)
    well = [answer.beat for answer in answers if answer.facts is not None]
    examination.take("bulk planes", await orders.probe_findings(well))


def _examine_named(
    cluster: RunningCluster, answers: list[AboutAnswer], examination: DoctorReport
) -> None:
    """The checks for which the state folder names the processes, which are of this machine."""
    sick = [f.words.split()[0] for f in examination.findings if f.name in ("stopped", "down")]
    examination.take("silence", list(unheard_findings(cluster.pids, answers, sick)))
    arenas = [
        str(answer.facts["arena"]) for answer in answers if answer.facts and "arena" in answer.facts
    ]
    examination.take("arena", [f for path in arenas for f in arena_findings(path)])


def _num_beating(cluster: RunningCluster | None) -> int:
    """The number of processes of the state folder that should send beats; 0 without one."""
    if cluster is None:
        return 0
    services = {name: pid for name, pid in cluster.pids.items() if name not in SERVERS}
    return sum(process_status(name, pid, cluster.down).is_well for name, pid in services.items())
