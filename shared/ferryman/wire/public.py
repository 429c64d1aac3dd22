"""The values of the public InferenceService, for the router and for the SDK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferryman.cache.keys import TokenIds
from ferryman.cache.manifest import Exactness
from ferryman.errors import Cancelled
from ferryman.schedule.prompt_scores import PromptScores
from ferryman.schedule.request import FinishReason
from ferryman.wire.values import Usage


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text as it is. With `parse_special` names of control tokens in it become those tokens; with
    `omit_special` none is put before or after it."""

    text: str
    parse_special: bool = False
    omit_special: bool = False


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation; `role` is a word the chat template knows.

    `more` is the JSON text of an object, or empty: more fields that a template may read, such as
    `tool_calls` and `tool_call_id`.
    """

    role: str
    content: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns for the model's chat template. With `parse_special` names of control tokens in the
    turns become those tokens; the template's own always do.

    `variables` is the JSON text of an object, or empty: what the template may read besides, such as
    `tools`.
    """

    turns: tuple[ChatTurn, ...]
    parse_special: bool = False
    variables: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """Token ids [tokens] as they are. At `fork_points`, positions in them, other prompts are likely
    to part from this one: state is kept there, if there is room."""

    token_ids: TokenIds
    fork_points: tuple[int, ...] = ()


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Parting:
    """The place at which a prompt parts from the latest one of its owner that is most like it.

    That one's caller called it `request_id`. The token at `position`, in the part of the prompt
    that `place` names, is the first that differs; the texts are a few characters before it, and
    from it on in both. Of `missed_tokens` there could have been cached state.
    """

    request_id: str
    position: int
    place: str
    missed_tokens: int
    before: str
    ours: str
    theirs: str

    def __bool__(self) -> bool:
        return bool(self.request_id)


# It begins as the other one does, or there is no other one.
NOT_PARTED = Parting("", 0, "", 0, "", "", "")


@dataclass(frozen=True, slots=True)
class GenerateStarted:
    """The first event of a stream: the router's parameters of the request."""

    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    parting: Parting = NOT_PARTED


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive tokens; `text` may lag behind them while a character is incomplete."""

    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateFinished:
    """The last event of a stream; `text` was held back until then. `matched_stop` is the stop
    string that ended it, empty if none did. `exactness` is that of the whole answer.

    Raises Cancelled for a request that was cancelled: its answer is cut, and a cut answer ends
    with an error.
    """

    reason: FinishReason
    usage: Usage
    text: str = ""
    matched_stop: str = ""
    exactness: Exactness = Exactness.VALUES

    def __post_init__(self) -> None:
        if self.reason is FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled before its answer was complete")


GenerateEvent = GenerateStarted | PromptScores | TokenChunk | GenerateFinished


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """A pair of workers, the seconds predicted for it, and the tiers of the prefix.

    `usable_tokens` is the sum over the tiers. `fetch_seconds` are from storage or a peer into the
    host tier, `load_seconds` into the device, `row_seconds` the wait for a row at decode;
    `recompute_seconds` is the time to compute the fetched and loaded tokens instead. `plane` is the
    data plane that both workers have. An answer by this pair has its `exactness`; `unlike_tokens`
    are kept in another arithmetic, and more than it can use, else 0.
    """

    prefill_worker_id: str
    decode_worker_id: str
    queue_seconds: float
    load_seconds: float
    prefill_seconds: float
    handoff_seconds: float
    total_seconds: float
    usable_tokens: int
    host_tokens: int
    fetch_seconds: float = 0.0
    row_seconds: float = 0.0
    recompute_seconds: float = 0.0
    device_tokens: int = 0
    storage_tokens: int = 0
    peer_tokens: int = 0
    plane: str = ""
    exactness: Exactness = Exactness.VALUES
    unlike_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteExplanation:
    """One routing decision: the choice, and the other candidates, best first."""

    attempt: int
    chosen: RouteCandidate
    others: tuple[RouteCandidate, ...] = ()


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """One entry of the lifecycle log; `json` is the published text."""

    role: str
    worker_id: str
    event: str
    json: str
    stream_sequence: int


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; `max_len` bounds prompt and output together. `arithmetics` are those of the
    workers, and `exactness` what all of them promise."""

    model_id: str
    family: str
    dtype: str
    max_len: int
    page_size: int
    manifest_digest: str
    created_unix_seconds: int
    vocab: int
    exactness: Exactness = Exactness.VALUES
    arithmetics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SignedState:
    """The signed part of a state file: a statement as its text, the Ed25519 signature of the
    text, and the digests of all units (blake2b, 32 bytes each)."""

    statement: str
    signature: bytes
    unit_digests: bytes


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state of a file at a cluster: `usable_tokens` of its `num_tokens` can be resumed from the
    host-cache of `node`; `stored_units` are new there."""

    node: str
    num_tokens: int
    usable_tokens: int
    stored_units: int
