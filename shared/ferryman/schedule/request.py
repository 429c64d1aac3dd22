"""A request and its sampling parameters, checked once when they enter."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ferryman.cache.keys import PageKey, TokenIds
from ferryman.errors import InvalidRequest
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.schedule.token_rules import NO_RULES, TokenRules

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20


class FinishReason(StrEnum):
    """The reason why a request has no further token."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for drawing tokens. Temperature 0 is greedy; `logprobs` counts alternatives (0:
    none). With `prompt_logprobs` the prompt's own tokens have log probabilities too, and so many
    alternatives each; None asks for none. With a `grammar` only tokens are drawn that it allows,
    and it decides when the output may end.

    Raises InvalidRequest, naming the parameter, for values out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False
    grammar: OutputGrammar | None = None
    rules: TokenRules = NO_RULES
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_stop(self.stop)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            message = f"at most {MAX_STOP_TOKEN_IDS} stop token ids are allowed"
            raise InvalidRequest(message, "stop_token_ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**32 - 1)
        if self.grammar is not None and self.ignore_eos:
            message = "ignore_eos and a grammar exclude each other: the grammar says where to end"
            raise InvalidRequest(message, "ignore_eos")
        if self.grammar is not None and (banning := self.rules.banning):
            # Together they could leave no token at all.
            raise InvalidRequest(f"{banning} and a grammar exclude each other", banning)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from {low} to {high}", name)


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN and infinity lie outside every range, and so do integers that no float can hold.
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        least = "above" if open_low else "from"
        raise InvalidRequest(f"{name} must be a finite number {least} {low} to {high}", name)


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_BYTES:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_BYTES} bytes", "stop")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest("a stop string is not valid Unicode", "stop") from error
        if num_bytes > MAX_STOP_BYTES:
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_BYTES} bytes", "stop")


class Adapter(NamedTuple):
    """A LoRA adapter: its number on this worker, from 1, and the hex digest of its content. The
    number 0 is the model alone."""

    number: int = 0
    digest: str = ""


NO_ADAPTER = Adapter()


class Pin(NamedTuple):
    """A position of a prompt whose state its caller wants to be kept for so long."""

    position: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as the scheduler sees it: token ids [tokens], their page keys, and how to sample.

    `num_generated` of the token ids at the end were generated by an earlier attempt: sampling
    continues after them, and penalties count them as output. `tenant_salt` and the digest of
    `adapter` are part of the keys, also of the pages that decoding fills. `num_siblings` requests
    of the very same prompt, other choices of one answer, will follow to the same decode worker.
    `fork_points` are positions at which other prompts are likely to part from this one, rising:
    state is kept there while it is computed, so that already the second prompt finds it. At `pins`
    it is kept for longer than other state, while there is some other to give up.
    """

    request_id: str
    token_ids: TokenIds
    keys: tuple[PageKey, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    num_generated: int = 0
    tenant_salt: bytes = b""
    adapter: Adapter = NO_ADAPTER
    num_siblings: int = 0
    fork_points: tuple[int, ...] = ()
    pins: tuple[Pin, ...] = ()

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_logprobs(self) -> int | None:
        """The number of alternatives to each of the prompt's tokens, if those are to be scored.
        They are scored once: a request that has generated tokens has sent its scores."""
        return None if self.num_generated else self.sampling.prompt_logprobs
