"""Orders over the control subject: `flush` gives up what is held, `drain` ends the process."""

from __future__ import annotations

import json
from collections.abc import Callable

from ferryman.errors import InvalidRequest
from ferryman.wire.bus import Message
from ferryman.wire.subjects import ControlSubject, Subjects
from ferryman_hostcache.host import HostCache

FLUSH_ALL = "all"


class Orders:
    """Answers in JSON. `flush` takes the host tier, with the payload `all` the storage tier too."""

    def __init__(self, host: HostCache, subjects: Subjects, drain: Callable[[], None]) -> None:
        self._host, self._subjects, self._drain = host, subjects, drain

    async def obey(self, message: Message) -> bytes:
        """Raises InvalidRequest for an order that is none."""
        subject = self._subjects.parse(message.subject)
        assert isinstance(subject, ControlSubject), "only control subjects are answered"
        match subject.verb, message.payload.decode():
            case "flush", "" | "host":
                return json.dumps({"dropped": self._host.flush()}).encode()
            case "flush", what if what == FLUSH_ALL:
                return json.dumps({"dropped": self._host.flush_all()}).encode()
            case "drain", _:
                self._drain()
                return b'{"draining": true}'
        raise InvalidRequest(f"no order is called {subject.verb!r}", "verb")
