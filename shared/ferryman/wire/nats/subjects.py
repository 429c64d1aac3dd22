"""Spells NATS subjects; no other module does. Publishers and listeners: docs/protocol.md.

ferryman.v1.<cluster>.life.<role>.<worker-id>.<request-id>.<event>
ferryman.v1.<cluster>.hops.<role>.<worker-id>.<request-id>
ferryman.v1.<cluster>.worker.<role>.<worker-id>.beat
ferryman.v1.<cluster>.cache.<worker-id>.<epoch>
ferryman.v1.<cluster>.control.<role>.<worker-id>.<verb>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ferryman.errors import InvalidRequest
from ferryman.ids import NO_REQUEST, check_request_id

PREFIX = "ferryman.v1"
EVERYTHING = "ferryman.>"
REFUSED_LOGINS = "$SYS.SERVER.*.CLIENT.AUTH.ERR"  # nats-server's own, one message a refused login
ALL_HOPS = f"{PREFIX}.*.hops.>"
ALL_BEATS, ALL_CACHE = f"{PREFIX}.*.worker.*.*.beat", f"{PREFIX}.*.cache.*.*"
ALL_CONTROL = f"{PREFIX}.*.control.*.*.*"
MAX_NAME_LEN = 64

_NAME = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{MAX_NAME_LEN - 1}}}")
_EPOCH = re.compile(r"[1-9][0-9]{0,18}")


def check_name(text: str, what: str) -> str:
    """The name itself, or InvalidRequest: lower-case letters, digits, underscore, hyphen."""
    if not _NAME.fullmatch(text):
        excerpt = text if len(text) <= MAX_NAME_LEN else text[:MAX_NAME_LEN] + "…"
        raise InvalidRequest(
            f"{what} {excerpt!r} must be 1 to {MAX_NAME_LEN} of a-z, 0-9, _ and -, and begin"
            " with a letter or digit",
            what,
        )
    return text


@dataclass(frozen=True, slots=True)
class LifeSubject:
    """The subject for one event of one request."""

    role: str
    worker_id: str
    request_id: str
    event: str


@dataclass(frozen=True, slots=True)
class BeatSubject:
    """The subject for one worker's heartbeats."""

    role: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class CacheSubject:
    """The subject for the cache events of one life of one worker."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ControlSubject:
    """The subject for orders of one kind to one worker."""

    worker_id: str
    verb: str


Subject = LifeSubject | BeatSubject | CacheSubject | ControlSubject


@dataclass(frozen=True)
class Subjects:
    """All subjects of one cluster. The `all_…` ones are patterns to subscribe to."""

    cluster: str = "local"

    def __post_init__(self) -> None:
        check_name(self.cluster, "cluster")

    @property
    def root(self) -> str:
        return f"{PREFIX}.{self.cluster}"

    def life(self, role: str, worker_id: str, request_id: str, event: str) -> str:
        check_name(role, "role")
        check_name(worker_id, "worker id")
        _check_request(request_id)
        return f"{self.root}.life.{role}.{worker_id}.{request_id}.{check_name(event, 'event')}"

    def hops(self, role: str, worker_id: str, request_id: str) -> str:
        """The subject on which a broker says what it did with this worker's events of a request."""
        check_name(role, "role")
        check_name(worker_id, "worker id")
        return f"{self.root}.hops.{role}.{worker_id}.{_check_request(request_id)}"

    def beat(self, role: str, worker_id: str) -> str:
        check_name(role, "role")
        return f"{self.root}.worker.{role}.{check_name(worker_id, 'worker id')}.beat"

    def cache(self, worker_id: str, epoch: int) -> str:
        check_name(worker_id, "worker id")
        if not 0 < epoch < 2**63:
            raise InvalidRequest(f"epoch {epoch} is not from 1 to 2^63 - 1", "epoch")
        return f"{self.root}.cache.{worker_id}.{epoch}"

    def control(self, worker_id: str, verb: str) -> str:
        return f"{self._control_of(worker_id)}.{check_name(verb, 'verb')}"

    @property
    def all_life(self) -> str:
        return f"{self.root}.life.>"

    def all_life_of(self, request_id: str) -> str:
        return f"{self.root}.life.*.*.{_check_request(request_id)}.*"

    def all_hops_of(self, request_id: str) -> str:
        return f"{self.root}.hops.*.*.{_check_request(request_id)}"

    @property
    def all_received(self) -> str:
        """The subject of the event that begins each request and has its caller's name for it."""
        return f"{self.root}.life.router.*.*.received"

    @property
    def all_beats(self) -> str:
        return f"{self.root}.worker.*.*.beat"

    @property
    def all_cache(self) -> str:
        return f"{self.root}.cache.*.*"

    def all_control_of(self, worker_id: str) -> str:
        return f"{self._control_of(worker_id)}.*"

    def all_control_of_role(self, role: str) -> str:
        return f"{self.root}.control.{check_name(role, 'role')}.*.*"

    def _control_of(self, worker_id: str) -> str:
        """The subject has the role of the id: a login may hear the orders to its own alone."""
        role, _, _ = check_name(worker_id, "worker id").partition("-")
        return f"{self.root}.control.{role}.{worker_id}"

    def parse(self, subject: str) -> Subject:
        """The parts of a subject of this cluster; InvalidRequest for any other subject."""
        head, _, tail = subject.partition(self.root + ".")
        match [] if head else tail.split("."):
            case ["life", role, worker_id, request_id, event]:
                made = self.life(role, worker_id, request_id, event)
                return _same(made, subject, LifeSubject(role, worker_id, request_id, event))
            case ["worker", role, worker_id, "beat"]:
                return _same(self.beat(role, worker_id), subject, BeatSubject(role, worker_id))
            case ["cache", worker_id, epoch] if _EPOCH.fullmatch(epoch):
                made = self.cache(worker_id, int(epoch))
                return _same(made, subject, CacheSubject(worker_id, int(epoch)))
            case ["control", _, worker_id, verb]:
                made = self.control(worker_id, verb)
                return _same(made, subject, ControlSubject(worker_id, verb))
        raise InvalidRequest(f"{subject!r} is no subject of cluster {self.cluster}", "subject")


def _check_request(request_id: str) -> str:
    """Events without a request are published too."""
    return request_id if request_id == NO_REQUEST else check_request_id(request_id)


def _same(made: str, subject: str, parsed: Subject) -> Subject:
    assert made == subject, f"parsing {subject!r} and spelling it again gave {made!r}"
    return parsed
