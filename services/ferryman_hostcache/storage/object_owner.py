"""The ownership of a prefix of an object store: an object that its owner renews.

Only conditional puts decide, never a clock of another machine. A newcomer that finds the object
watches it: renewed within a lease, it has an owner; otherwise the newcomer replaces the version
that it saw. An owner that could not renew for half a lease stops writing. Each owner has a term of
its own, above those of all former owners. So an owner that only seemed dead writes under names that
no later owner gives.
"""

from __future__ import annotations

import errno
import logging
import struct
import time
import uuid
from collections.abc import Callable
from threading import Event, Thread

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import ObjectStore

from ferryman.errors import ConfigError
from ferryman_hostcache.storage.object_reader import explained

log = logging.getLogger(__name__)

OWNER_NAME = "owner.lock"
LEASE_SECONDS = 30.0
RENEWALS = 15  # in one lease


_CONTENT = struct.Struct("<16sQQ")  # identity, turn, term


class ObjectOwner:
    """One process' claim on the objects under a prefix."""

    def __init__(
        self, objects: ObjectStore, place: str, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self._objects, self._place, self._seconds = objects, place, lease_seconds
        self._identity, self._turn, self._term = uuid.uuid4().bytes, 0, 0
        self._version: str | None = None
        self._renewed = float("-inf")
        self._ending = Event()
        self._thread = Thread(target=self._renew, name="storage-owner", daemon=True)

    @property
    def term(self) -> int:
        """The number of this ownership, from 1 on."""
        return self._term

    def take(self, last_term: Callable[[], int]) -> None:
        """Blocks for a lease when a former owner ended without giving back. Raises ConfigError when
        there is an owner, or the store cannot be used. `last_term` is called once this is the
        owner: it returns the highest term that the objects show."""
        try:
            if not self._try_create():
                self._take_over()
            self._term = 1 + max(self._term, last_term())
            self._put({"e_tag": self._version})
        except (BaseError, OSError) as error:
            raise ConfigError(f"object storage {self._place}: {explained(error)}") from error
        self._thread.start()

    def _try_create(self) -> bool:
        try:
            self._put("create")
        except AlreadyExistsError:
            return False
        return True

    def _take_over(self) -> None:
        former = obstore.get(self._objects, OWNER_NAME)
        seen, content = former.meta["e_tag"], bytes(former.bytes())
        log.info("watching %s: it had an owner, for %g s", self._place, self._seconds)
        end = time.monotonic() + self._seconds
        while time.monotonic() < end and not self._ending.wait(self._seconds / RENEWALS):
            if self._seen() != seen:
                raise self._belongs_to_another()
        self._term = _term_in(content)
        try:
            self._put({"e_tag": seen})
        except PreconditionError as error:
            raise self._belongs_to_another() from error

    def _seen(self) -> str | None:
        version: str | None = obstore.head(self._objects, OWNER_NAME)["e_tag"]
        return version

    def _belongs_to_another(self) -> ConfigError:
        return ConfigError(
            f"object storage {self._place} belongs to another host-cache that runs; give this one "
            "a prefix of its own"
        )

    def _put(self, mode: obstore.PutMode) -> None:
        """Puts a new version, different from all before, if the version in `mode` is the last."""
        began = time.monotonic()
        self._turn += 1
        content = _CONTENT.pack(self._identity, self._turn, self._term)
        try:
            self._version = obstore.put(self._objects, OWNER_NAME, content, mode=mode)["e_tag"]
        except (AlreadyExistsError, PreconditionError):
            # An earlier try may have come through although its answer was lost.
            current = obstore.get(self._objects, OWNER_NAME)
            if not bytes(current.bytes()).startswith(self._identity):
                raise
            self._version = current.meta["e_tag"]
        self._renewed = began

    def _renew(self) -> None:
        """Renews on a thread, until the ownership is given back or lost."""
        while not self._ending.wait(self._seconds / RENEWALS):
            try:
                self._put({"e_tag": self._version})
            except (PreconditionError, FileNotFoundError):
                log.error("another host-cache took %s over: nothing is written", self._place)
                self._renewed = float("-inf")
                return
            except (BaseError, OSError) as error:
                log.warning("cannot renew %s: %s", self._place, str(error).partition("\n")[0])

    def check(self) -> None:
        """Raises ESTALE when another process may own the objects by now."""
        if time.monotonic() - self._renewed > self._seconds / 2:
            raise OSError(errno.ESTALE, "another process may own the objects")

    def give_back(self) -> None:
        """Frees the claim, so the next owner need not wait, if the store can still be reached."""
        self._ending.set()
        self._thread.join()
        try:
            self.check()
            obstore.delete(self._objects, OWNER_NAME)
        except (BaseError, OSError):
            log.warning("could not give %s back; the next owner waits for it", self._place)


def _term_in(content: bytes) -> int:
    """The term in an owner's object; 0 if it is none."""
    return int(_CONTENT.unpack(content)[2]) if len(content) == _CONTENT.size else 0
