"""Findings from heartbeats, and from the processes' answers about themselves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from ferryman.runtime.version import package_version
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, StartBeat
from ferryman_cli.doctor.fault_report import DoctorFinding, warning
from ferryman_cli.doctor.machine import limit_findings
from ferryman_cli.doctor.probes import AboutAnswer, is_worker

SERVERS = ("nats", "redis")
CLOCK_SECONDS = 60.0
"""Certificates, keys and logs are compared by clocks."""


def state_findings(beats: Iterable[Heartbeat]) -> Iterator[DoctorFinding]:
    """Workers whose state others cannot take over. The state that most workers have is right."""
    workers = [beat for beat in beats if is_worker(beat)]
    counts = Counter(beat.state.digest for beat in workers)
    if len(counts) < 2:
        return
    right = max(workers, key=lambda beat: counts[beat.state.digest])
    for beat in workers:
        if beat.state.digest != right.state.digest:
            yield _state_finding(beat, right)


def _state_finding(beat: Heartbeat, right: Heartbeat) -> DoctorFinding:
    mine, theirs = beat.state, right.state
    if mine.is_unlike(theirs):
        return DoctorFinding(
            "arithmetic",
            f"{beat.worker_id} computes in another arithmetic ({mine.arithmetic}) than"
            f" {right.worker_id} ({theirs.arithmetic}): neither takes the other's state",
            "make dtype, device and ranks of all workers alike, or say --exactness values",
        )
    return DoctorFinding(
        "manifest",
        f"{beat.worker_id} keeps other state than {right.worker_id}: {_difference(mine, theirs)};"
        " no request can be handed over between them",
        f"start {beat.worker_id} again with the model and the options of the others",
    )


def _difference(mine: ServedState, theirs: ServedState) -> str:
    if mine.page_size != theirs.page_size:
        return f"pages of {mine.page_size} tokens, not {theirs.page_size} (--page-size)"
    if mine.fingerprint != theirs.fingerprint:
        return "another model, or other weights (--model, --quantize, --draft)"
    return "another layout of pages (--kv-dtype)"


def beat_findings(
    beats: Iterable[Heartbeat], starts: Iterable[StartBeat], audible: Collection[str]
) -> Iterator[DoctorFinding]:
    """Workers that say they are not well, and those that start. `audible` are ids that beat."""
    for beat in beats:
        if beat.is_quarantined:
            yield DoctorFinding(
                "quarantined",
                f"{beat.worker_id} reuses nothing: an audit has found wrong state in it",
                f"ferryman drain {beat.worker_id} --even-last, and it begins anew; keep its log",
            )
    for start in starts:
        if start.worker_id not in audible:
            text = f"{start.worker_id} starts for {start.seconds:.0f} s: {start.doing}"
            yield warning("starting", text, "wait, or see ferryman logs -f")


def answer_findings(answers: Iterable[AboutAnswer]) -> Iterator[DoctorFinding]:
    """Versions, clocks, limits and host tiers of the processes that were asked."""
    for answer in answers:
        if answer.facts is None:
            yield DoctorFinding(
                "silent",
                f"{answer.beat.worker_id} beats, and does not answer an order: {answer.error}",
                f"ferryman logs {answer.beat.role} says what it does; ferryman drain"
                f" {answer.beat.worker_id} ends it",
            )
            continue
        yield from _facts_findings(answer, answer.facts)


def _facts_findings(answer: AboutAnswer, facts: Mapping[str, object]) -> Iterator[DoctorFinding]:
    name, current = answer.beat.worker_id, package_version()
    if (version := facts.get("version")) != current:
        yield DoctorFinding(
            "version",
            f"{name} runs version {version}, and this command {current}",
            f"pip install ferryman=={current} where {name} runs, then ferryman drain {name}",
        )
    if isinstance(clock := facts.get("clock"), int | float):
        middle = answer.asked_at + answer.seconds / 2
        yield from clock_findings(name, float(clock), middle, answer.seconds)
    if isinstance(soft := facts.get("open_files"), int):
        yield from limit_findings(soft, name)
    if (address := facts.get("hostcache")) and not answer.beat.node:
        yield DoctorFinding(
            "no-host-tier",
            f"{name} has no host tier: the host-cache at {address} does not take it",
            f"ferryman logs {answer.beat.role} says why; the host-cache must run on the same"
            " machine and see the same ARENA_FOLDER",
        )


def clock_findings(
    name: str, clock: float, here: float, slack: float = 0.0
) -> Iterator[DoctorFinding]:
    """A clock that differs from that of this machine by more than a minute."""
    off = clock - here
    if abs(off) > CLOCK_SECONDS + slack:
        side = "ahead of" if off > 0 else "behind"
        yield DoctorFinding(
            "clock",
            f"the clock of {name} is {abs(off):.0f} s {side} this machine's",
            f"timedatectl set-ntp true, on the machine of {name} or here: date -u on both says"
            " which is wrong",
        )


def unheard_findings(
    pids: Mapping[str, int], answers: Iterable[AboutAnswer], stopped: Collection[str]
) -> Iterator[DoctorFinding]:
    """Processes of the state folder that run and send no heartbeat. `stopped` have a finding."""
    heard = {answer.facts.get("pid") for answer in answers if answer.facts is not None}
    silent = any(answer.facts is None for answer in answers)
    for name, pid in pids.items():
        if name in SERVERS or name in stopped or pid in heard or silent:
            continue
        yield DoctorFinding(
            "no-beat",
            f"{name} (process {pid}) runs, and sends no heartbeat: a step of it is stuck, or it"
            " does not reach NATS",
            f"ferryman logs {name} says which; kill {pid}, and it is started again",
        )
