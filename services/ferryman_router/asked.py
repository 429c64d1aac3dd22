"""What a client asks for, whichever door it came through, once its form has been checked."""

from __future__ import annotations

from dataclasses import dataclass

from ferryman.cache.keys import TokenIds
from ferryman.errors import FerrymanError
from ferryman.schedule.request import SamplingParams
from ferryman.wire.public import Prompt


class Unauthenticated(FerrymanError):
    """The caller did not show a key that is known here."""

    code = "UNAUTHENTICATED"
    http_status = 401


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: requests of one tenant wait in one line and share one cache."""

    name: str
    salt: bytes


PUBLIC = Tenant("public", b"")


@dataclass(frozen=True, slots=True)
class Caller:
    """What came along with a request: who, how long, and the trace it belongs to."""

    request_id: str
    tenant: Tenant
    deadline_seconds: float
    traceparent: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as asked for; open-ended means as many tokens as the model has room for."""

    params: SamplingParams
    is_open_ended: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, ready to be tokenized. `model` may be empty: the one that is served."""

    caller: Caller
    model: str
    prompt: Prompt
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Asked:
    """An ask with its token ids, checked against the model: nothing about it can be wrong now."""

    caller: Caller
    token_ids: TokenIds
    params: SamplingParams
    stop_token_ids: frozenset[int]
    arrived: float

    @property
    def request_id(self) -> str:
        return self.caller.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)

    @property
    def deadline(self) -> float:
        return self.arrived + self.caller.deadline_seconds

    def is_same_as(self, other: Asked) -> bool:
        """Whether a repeated request id asks for the same thing."""
        same_tokens = self.token_ids.tobytes() == other.token_ids.tobytes()
        return same_tokens and self.params == other.params and self.tenant == other.tenant

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant
