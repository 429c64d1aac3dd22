"""The names of processes, requests and reservations.

A worker's id is the hash of a secret that its process makes at its start: by showing the secret a
process proves that the id is its own. Knowing the id alone proves nothing.

Every name except an epoch is one NATS token and needs no escaping in a URL, a log line or a file
name. The makers take their source of randomness as an argument, so that a test can choose the
result.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from ferryman.errors import InvalidRequest

RandomBits = Callable[[int], int]

MAX_REQUEST_ID_LEN = 64
MAX_CORRELATION_BYTES = 128
NO_REQUEST = "_"  # the request id of events that belong to no request
_REQUEST_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_REQUEST_ID_LEN}}}")
NO_SECRET = ""
_SECRET_BITS = 128
_ID_BYTES = 8  # to find another secret for an id takes some 2**64 hashes
_WORKER_ID = re.compile(rf"[a-z]+-[0-9a-f]{{{2 * _ID_BYTES}}}")


def make_epoch(random_bits: RandomBits = secrets.randbits) -> int:
    """The number of one life of a process: 1 to 2**63 - 1. Zero is reserved for "not given"."""
    return random_bits(63) or 1


def make_life_secret(random_bits: RandomBits = secrets.randbits) -> str:
    """The secret of one life of a process: 32 hex digits."""
    return f"{random_bits(_SECRET_BITS):032x}"


def worker_id_of(role: str, life_secret: str) -> str:
    """`<role>-<16 hex digits>`; the role is lower-case letters."""
    digest = hashlib.blake2b(life_secret.encode(), digest_size=_ID_BYTES, person=b"worker id")
    return _checked_worker_id(f"{role}-{digest.hexdigest()}")


def proves(life_secret: str, worker_id: str) -> bool:
    """Whether the worker id was made from this secret."""
    role, _, _ = worker_id.partition("-")
    if not _WORKER_ID.fullmatch(worker_id) or not life_secret:
        return False
    return hmac.compare_digest(worker_id_of(role, life_secret), worker_id)


def make_request_id(random_bits: RandomBits = secrets.randbits) -> str:
    """A request id for a caller that gave none."""
    return f"req-{random_bits(96):024x}"


def make_reservation_id(random_bits: RandomBits = secrets.randbits) -> str:
    """A reservation id, unique over all lives of all decode workers."""
    return f"res-{random_bits(96):024x}"


def check_request_id(text: str) -> str:
    """The id itself: 1 to 64 letters, digits, underscores and hyphens, but not NO_REQUEST. Raises
    InvalidRequest for any other text."""
    if not is_request_id(text):
        excerpt = text if len(text) <= MAX_REQUEST_ID_LEN else text[:MAX_REQUEST_ID_LEN] + "…"
        raise InvalidRequest(
            f"request id {excerpt!r} must be 1 to {MAX_REQUEST_ID_LEN} letters, digits, _ or -",
            "request_id",
        )
    return text


def is_request_id(text: str) -> bool:
    """Whether a request may have this id."""
    return text != NO_REQUEST and _REQUEST_ID.fullmatch(text) is not None


def check_correlation_id(text: str) -> str:
    """The caller's own name for a request: printable, 1 to 128 bytes. Raises InvalidRequest for any
    other text. Callers and proxies may use a name twice; each request also has a unique id."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        num_bytes = 0
    if not text.isprintable() or not 1 <= num_bytes <= MAX_CORRELATION_BYTES:
        message = f"a request is named by 1 to {MAX_CORRELATION_BYTES} printable bytes"
        raise InvalidRequest(message, "request_id")
    return text


def _checked_worker_id(text: str) -> str:
    assert _WORKER_ID.fullmatch(text), f"{text!r} is no worker id: the role must be lower case"
    return text
