"""The proof that a message on which others act comes from the process whose name it bears.

The broker knows roles, not processes: it lets a worker publish under the id of another one of its
role. So beats and cache events carry the secret of their sender's life in a header, and a worker's
id is made from that secret (`ferryman.ids`). Workers may not read them, so none learns another's
secret; routers and observers do.

A login hears the orders to all processes of its role, and may answer each. So answers carry the
secret, too: they go to the sender's own inbox, where no worker listens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ferryman.errors import PermissionDenied
from ferryman.ids import NO_SECRET, proves
from ferryman.wire.nats.bus import BusMessage, matches
from ferryman.wire.nats.subjects import ALL_BEATS, ALL_CACHE, ALL_CONTROL

LIFE_HEADER = "Ferryman-Life"

CheckSender = Callable[[BusMessage, str], None]


def proof_for(subject: str, life_secret: str) -> Mapping[str, str]:
    """The headers to send on a subject: none if no receiver asks for a proof."""
    if not life_secret:
        return {}
    is_asked = matches(ALL_BEATS, subject) or matches(ALL_CACHE, subject)
    return {LIFE_HEADER: life_secret} if is_asked else {}


def answer_proof(subject: str, life_secret: str) -> Mapping[str, str]:
    """The headers of an answer to a message on a subject: none if it is no order."""
    return {LIFE_HEADER: life_secret} if life_secret and matches(ALL_CONTROL, subject) else {}


def is_proven(subject: str, headers: Mapping[str, str]) -> bool:
    """Whether an answer to an order on a subject comes from the process that was ordered. Answers
    to anything else need no proof."""
    if not matches(ALL_CONTROL, subject):
        return True
    return proves(headers.get(LIFE_HEADER, NO_SECRET), subject.split(".")[-2])


def believe_all(message: BusMessage, worker_id: str) -> None:
    """The check of an open cluster: every message is believed."""


def check_sender(message: BusMessage, worker_id: str) -> None:
    """Raises PermissionDenied for a message that does not prove to come from this worker."""
    if not proves(message.headers.get(LIFE_HEADER, NO_SECRET), worker_id):
        raise PermissionDenied(f"this does not come from {worker_id}")
