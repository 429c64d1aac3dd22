"""A client's request, whichever door it came through, and the page keys of its prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b

from ferryman.cache.keys import PageKey, TokenIds, extend_keys, root_key
from ferryman.cache.manifest import ANY_ARITHMETIC
from ferryman.schedule.request import SamplingParams
from ferryman.text.located_prompt import LocatedPrompt
from ferryman.wire.nats.heartbeat import ServedState
from ferryman.wire.public import NOT_PARTED, Parting, Prompt
from ferryman_router.routing.fleet import WorkerName

KEY_CHARS, SALT_BYTES = 64, 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests: those of one tenant wait in one line and share one cache."""

    name: str
    salt: bytes


PUBLIC = Tenant("public", b"")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, its time, and the trace it belongs to.

    `request_id` is the request's own. `correlation_id` is what the caller calls it (empty:
    nothing); others may call theirs the same. `num_sent_before` is how often the caller has sent
    it before, by its own count, to any router. `parent_span` is the caller's span, of which the
    request's is a child; empty for none.
    """

    request_id: str
    tenant: Tenant
    deadline_seconds: float
    traceparent: str
    correlation_id: str = ""
    num_sent_before: int = 0
    parent_span: str = ""


@dataclass(frozen=True, slots=True)
class RequestedSampling:
    """Sampling as asked for; open-ended means as many tokens as the model has room for. The
    `bad_words` are texts, which the model's tokenizer makes token ids of."""

    params: SamplingParams
    is_open_ended: bool = False
    bad_words: tuple[str, ...] = ()

    @property
    def least_room(self) -> int:
        """Tokens that a prompt which may be cut has to leave for the answer."""
        return max(
            1, self.params.rules.min_tokens if self.is_open_ended else self.params.max_tokens
        )

    def sample(self, index: int) -> RequestedSampling:
        """The sampling of one of several answers to a prompt: each has a seed of its own."""
        seed = self.params.seed + index
        seed -= 2**64 if seed >= 2**63 else 0
        params = replace(self.params, seed=seed)
        if index:
            params = replace(params, prompt_logprobs=None)  # the first one's are those of all
        return replace(self, params=params)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The options of a text: the control tokens in `shown` are part of it, and the stop string
    that ends it if it `includes_stop`."""

    shown: frozenset[str] = frozenset()
    includes_stop: bool = False


PLAIN_TEXT = TextOptions()


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options of a prompt. `truncate` is how many of its last tokens are kept: 0 all, -1 as many
    as fit with the answer. Requests with different salts never share cached state, even within one
    tenant. Of one tenant, requests with a lower `priority` number are placed first."""

    truncate: int = 0
    cache_salt: str = ""
    priority: int = 0


WHOLE_PROMPT = PromptOptions()


def kept_tokens(truncate: int, sampling: RequestedSampling, max_prompt_len: int) -> int:
    """The number of tokens that are kept of a prompt's end, 0 for all of them. A prompt of
    `max_prompt_len` tokens leaves room for one token of output."""
    if truncate >= 0:
        return truncate
    # With no room for a prompt one token stays, and the check of the sum names max_tokens.
    return max(1, max_prompt_len + 1 - sampling.least_room)


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """The other answers to a request's prompt. `num_siblings` will follow it; `decode` is the
    worker that has the whole prompt from an earlier one."""

    num_siblings: int = 0
    decode: WorkerName | None = None


ALONE = PromptSharing()


@dataclass(frozen=True, slots=True)
class PastLife:
    """A request's life at another router, up to where its client lost it. `attempt` is the latest
    that is known, `decode` the id of its decode worker, `token_ids` are those that the client
    has. `arithmetics` are those of all attempts, with ANY_ARITHMETIC for one that is not
    known."""

    router_id: str
    attempt: int
    decode: str
    token_ids: tuple[int, ...]
    arithmetics: frozenset[str] = frozenset({ANY_ARITHMETIC})


NO_PAST = PastLife("", 0, "", ())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, ready to be tokenized. `model` may be empty: the one that is served.

    `arrived` is the monotonic time at which all of it was received: deadlines count from it.
    `ignored` are fields of its body that had no effect, for its trace, and `is_chat` whether it
    came as messages.
    """

    caller: Caller
    model: str
    prompt: Prompt
    sampling: RequestedSampling
    arrived: float
    text: TextOptions = PLAIN_TEXT
    options: PromptOptions = WHOLE_PROMPT
    sharing: PromptSharing = ALONE
    past: PastLife = NO_PAST
    ignored: tuple[str, ...] = ()
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request with its token ids, checked against the model: nothing about it can be wrong now.
    Its `request` has the name that it is served under; `adapter` is the digest of the LoRA adapter
    of that name, empty for the model alone. `parting` is from an earlier prompt of its owner."""

    request: GenerateRequest
    located: LocatedPrompt
    params: SamplingParams
    stop_token_ids: frozenset[int]
    adapter: str = ""
    parting: Parting = NOT_PARTED

    @property
    def token_ids(self) -> TokenIds:
        return self.located.token_ids

    @property
    def caller(self) -> Caller:
        return self.request.caller

    @property
    def arrived(self) -> float:
        return self.request.arrived

    @property
    def past(self) -> PastLife:
        return self.request.past

    @property
    def request_id(self) -> str:
        return self.caller.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)

    @property
    def deadline(self) -> float:
        return self.arrived + self.caller.deadline_seconds

    def is_same_as(self, other: TokenizedRequest) -> bool:
        """Whether a repeated request id asks for the same thing."""
        same_tokens = self.token_ids.tobytes() == other.token_ids.tobytes()
        return (
            same_tokens
            and (self.params, self.tenant) == (other.params, other.tenant)
            and (self.request.options, self.adapter) == (other.request.options, other.adapter)
        )

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    @property
    def key_salt(self) -> bytes:
        """The salt of the prompt's page keys: the tenant's, and the caller's own under it."""
        salt, caller_salt = self.tenant.salt, self.request.options.cache_salt
        if not caller_salt:
            return salt
        # Hashed with the tenant's as the key: no caller can name another tenant's salt.
        digest = blake2b(caller_salt.encode(), key=salt[:KEY_CHARS], digest_size=SALT_BYTES)
        return digest.digest()


class PageKeyCache:
    """Computes a chain of keys once, when a worker with that state is first considered."""

    def __init__(self, token_ids: TokenIds, tenant_salt: bytes, adapter: str = "") -> None:
        self._token_ids, self._salt, self._adapter = token_ids, tenant_salt, adapter
        self._known: dict[ServedState, tuple[PageKey, ...]] = {}

    @property
    def token_ids(self) -> TokenIds:
        return self._token_ids

    def of(self, state: ServedState) -> tuple[PageKey, ...]:
        """The keys of all full pages; usually the whole fleet has one state."""
        keys = self._known.get(state)
        if keys is None:
            root = root_key(state, self._salt, self._adapter)
            keys = extend_keys(root, (), self._token_ids, state.page_size)
            self._known[state] = keys
        return keys

    def extended(self, token_ids: TokenIds) -> PageKeyCache:
        """The chains of a longer list that begins with this one's tokens."""
        longer = PageKeyCache(token_ids, self._salt, self._adapter)
        for state, keys in self._known.items():
            root = root_key(state, self._salt, self._adapter)
            longer._known[state] = extend_keys(root, keys, token_ids, state.page_size)
        return longer
