"""Permissions on the broker: the subjects that each role may publish on, and those it may read.

All of them are listed here, from the table in docs/protocol.md. The broker refuses everything else:
orders by any role but a router, another role's events and beats, and other limits for the lifecycle
log, or its removal, by any role but a router, which makes it anew where it stores nothing.

All users are of one account. The system account of nats-server has none: it exports one subject to
ours, on which routers learn of refused logins.
Source: https://docs.nats.io/running-a-nats-service/configuration/sys_accounts
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferryman.security.credentials import ClusterRole, RoleCredentials
from ferryman.wire.nats.lifecycle_log import STREAM
from ferryman.wire.nats.subjects import EVERYTHING, REFUSED_LOGINS, Subjects

log = logging.getLogger(__name__)

INBOX = "_INBOX"
ACCOUNT, SYSTEM_ACCOUNT = "ferryman", "$SYS"
MAX_SHOWN = 32
MAX_FILE_STORE = 1 << 30
_REFUSED = ("permissions violation", "authorization violation")
_DISCOVERY = tuple(
    f"$SRV.{verb}{tail}" for verb in ("PING", "INFO", "STATS") for tail in ("", ".>")
)
_READ_LOG = (
    f"$JS.API.STREAM.INFO.{STREAM}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}",
    f"$JS.API.CONSUMER.CREATE.{STREAM}.>",
    f"$JS.API.CONSUMER.INFO.{STREAM}.*",
    f"$JS.API.CONSUMER.DELETE.{STREAM}.*",
    f"$JS.FC.{STREAM}.>",
)
_KEEP_LOG = tuple(f"$JS.API.STREAM.{verb}.{STREAM}" for verb in ("CREATE", "UPDATE", "DELETE"))
# A worker that does both reports each part under that part's role.
_TOLD_AS = {ClusterRole.BOTH: (ClusterRole.PREFILL, ClusterRole.DECODE)}
_ORDERED = tuple(role for role in ClusterRole if role is not ClusterRole.OBSERVER)
_WORKERS = (ClusterRole.PREFILL, ClusterRole.DECODE, ClusterRole.BOTH)


@dataclass(frozen=True, slots=True)
class BrokerPermissions:
    """Patterns of subjects. A role that `answers` may answer each message once."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool


def inbox_of(user: str) -> str:
    """The prefix of the subjects on which a user gets answers: no other user may read them."""
    return f"{INBOX}.{user}" if user else INBOX


def permissions_of(role: ClusterRole, cluster: str) -> BrokerPermissions:
    """The permissions of a role in the cluster of this name."""
    subjects, inbox = Subjects(cluster), f"{inbox_of(role.value)}.>"
    if role is ClusterRole.OBSERVER:
        return BrokerPermissions((*_DISCOVERY, *_READ_LOG), (EVERYTHING, inbox), answers=False)
    root = subjects.root
    parts = _TOLD_AS.get(role, (role,))
    # The broker traces an event to a subject on which its publisher may publish, or refuses it.
    life = tuple(
        f"{root}.{tail}" for part in parts for tail in (f"life.{part}.*.*.*", f"hops.{part}.*.*")
    )
    own_subjects = (*life, f"{root}.worker.{role.value}.*.beat")
    subscribed = (subjects.all_control_of_role(role.value), inbox, *_DISCOVERY)
    if role is ClusterRole.ROUTER:
        orders = tuple(map(subjects.all_control_of_role, _ORDERED))
        published = (*own_subjects, *orders, *_READ_LOG, *_KEEP_LOG)
        beats_and_more = (subjects.all_beats, subjects.all_cache, REFUSED_LOGINS)
        return BrokerPermissions(published, (*beats_and_more, *subscribed), answers=True)
    cache = (subjects.all_cache,) if role in _WORKERS else ()
    return BrokerPermissions((*own_subjects, *cache), subscribed, answers=True)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A server's certificate and its key, which it reads again at SIGHUP."""

    certificate: Path
    key: Path


def broker_config(
    credentials: Iterable[RoleCredentials],
    cluster: str,
    monitor: str | None = None,
    certificate: CertificateFiles | None = None,
) -> str:
    """A configuration file of nats-server that knows only these users. It has their passwords.

    `monitor` is the host:port where the server shows everybody its health and its clients'
    subjects: None, or a loopback address. With a `certificate` it takes TLS alone.
    """
    users = [_user(entry, permissions_of(entry.role, cluster)) for entry in credentials]
    refused = {"account": SYSTEM_ACCOUNT, "subject": REFUSED_LOGINS}
    accounts = {
        SYSTEM_ACCOUNT: {"exports": [{"stream": REFUSED_LOGINS, "accounts": [ACCOUNT]}]},
        ACCOUNT: {"jetstream": "enabled", "users": users, "imports": [{"stream": refused}]},
    }
    # By default it is a share of what is free at its start: on a full disk no log could be made
    # until the next one.
    jetstream = {"max_file_store": MAX_FILE_STORE}
    config: dict[str, Any] = {"accounts": accounts, "jetstream": jetstream}
    if monitor is not None:
        config["http"] = monitor
    if certificate is not None:
        config["tls"] = {
            "cert_file": str(certificate.certificate),
            "key_file": str(certificate.key),
        }
    return json.dumps(config, indent=1) + "\n"


def _user(credentials: RoleCredentials, may: BrokerPermissions) -> Mapping[str, Any]:
    permissions: dict[str, Any] = {
        "publish": {"allow": list(may.publish)},
        "subscribe": {"allow": list(may.subscribe)},
    }
    if may.answers:
        permissions["allow_responses"] = {"max": 1, "expires": "2m"}
    login = credentials.nats
    return {"user": login.user, "password": login.password, "permissions": permissions}


class BrokerRefusals:
    """Counts refusals and warns of each kind once: a refused beat comes again each second."""

    def __init__(self) -> None:
        self.number = 0
        self._shown: set[str] = set()

    def take(self, error: Exception) -> bool:
        """Whether an error of the connection is a refusal; then it was counted."""
        text = str(error)
        if not any(words in text.lower() for words in _REFUSED):
            return False
        self.number += 1
        if text not in self._shown and len(self._shown) < MAX_SHOWN:
            self._shown.add(text)
            log.warning("the broker refuses this process: %s", text)
        return True
