"""The audit that is open: what the request held, and its tokens, to be computed and drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ferryman.cache.keys import PageKey, TokenIds
from ferryman.cache.slots import Holder, Role
from ferryman.schedule.batch import SampleRequest
from ferryman.schedule.events import HeldUnit
from ferryman.schedule.request import Request, SamplingParams
from ferryman.schedule.sequence import RunningSequence

# A request that comes meanwhile waits for one chunk at most, so they are short.
CHUNK_TOKENS = 64
# Tokens are drawn from logits of the whole vocabulary, which take time and memory.
DRAWN_TOKENS = 32
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def audit_name(request_id: str) -> str:
    """The name under which a request is computed again, and errors of that are reported: they are
    not the request's."""
    return f"{request_id} audit"


@dataclass(slots=True)
class OpenAudit:
    """The open audit of the request `name`: its units, and its tokens up to `position` as a request
    that resumes nowhere. `token_ids` are all of them; those from `first_output` on were drawn by
    `sampling` and `stop_token_ids`, if it is not None. The first that is another one, drawn again,
    is `wrong_token`."""

    name: str
    first: PageKey
    request: Request
    units: tuple[HeldUnit, ...]
    reuse: tuple[str, ...]
    token_ids: TokenIds
    first_output: int
    sampling: SamplingParams | None
    stop_token_ids: frozenset[int]
    wrong_token: int | None = None
    awaits_memory: bool = False
    cold: RunningSequence | None = None
    holder: Holder = field(init=False)

    def __post_init__(self) -> None:
        self.holder = Holder(Role.AUDIT, self.name)

    @property
    def position(self) -> int:
        return self.request.prompt_len

    @property
    def chunk_tokens(self) -> int:
        """The longest chunk that comes next."""
        start = self.cold.scheduled if self.cold else 0
        draws = self.sampling is not None and start + CHUNK_TOKENS >= self.first_output
        return DRAWN_TOKENS if draws else CHUNK_TOKENS

    def draws(self, cold: RunningSequence, start: int, end: int) -> tuple[SampleRequest, ...]:
        """The draws of the answer's tokens behind those of a chunk."""
        if self.sampling is None:
            return ()
        positions = range(max(start + 1, self.first_output), min(end + 1, len(self.token_ids)))
        return tuple(
            SampleRequest(
                cold.row,
                position,
                self.first_output,
                self.sampling,
                self.stop_token_ids,
                cold.order,
            )
            for position in positions
        )

    def check(self, draws: Sequence[SampleRequest], tokens: Sequence[int]) -> None:
        """Looks for a token that is another one than the answer has."""
        if self.sampling is None or self.wrong_token is not None:
            return
        served = self.token_ids
        wrong = (
            draw.position
            for draw, token in zip(draws, tokens, strict=True)
            if draw.position < len(served) and token != int(served[draw.position])
        )
        self.wrong_token = next(wrong, None)


def audit_of(
    sequence: RunningSequence, position: int, units: tuple[HeldUnit, ...], reuse: tuple[str, ...]
) -> OpenAudit:
    """The audit of a request up to `position`, whose resume set it holds in `units`."""
    name, asked, token_ids = sequence.request_id, sequence.request, sequence.token_ids()
    again = Request(audit_name(name), token_ids[:position], (), GREEDY, adapter=asked.adapter)
    return OpenAudit(
        name,
        sequence.keys[0] if sequence.keys else b"",
        again,
        units,
        reuse,
        token_ids,
        sequence.first_output,
        _drawn_again(asked.sampling),
        asked.stop_token_ids,
    )


def _drawn_again(sampling: SamplingParams) -> SamplingParams | None:
    """The parameters by which an answer's tokens are drawn again; None under a grammar: requests
    hold it compiled, and to compile it anew takes seconds of a step."""
    return None if sampling.grammar is not None else replace(sampling, logprobs=0)
