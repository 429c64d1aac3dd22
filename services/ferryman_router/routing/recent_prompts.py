"""The latest prompts of each tenant, to tell where a new one parts from them. Pure.

A prompt that begins as another one is computed from where they part on. A clock, a hash or a tool
in another order, early in a prompt, costs all that follows, and nobody sees it. So the router keeps
a few prompts for their owner and says where the next one parts, from which, and what that cost.
They are never in an event, and no tenant sees another's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferryman.cache.keys import TokenIds
from ferryman.text.chat_beginnings import common_length
from ferryman.text.located_prompt import LocatedPrompt, NamedPlace
from ferryman.wire.public import NOT_PARTED, Parting
from ferryman_router.routing.generate_request import TokenizedRequest

MAX_TOKENS = 16 << 20  # of all prompts, 64 MiB
SHOWN_TOKENS, SHOWN_CHARS = 12, 40

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Unknown:
    """No prompt of this name is kept."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """The other prompt was for another model: `num_tokens` that both have are computed anew."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Alike:
    """One of the two prompts begins as the other one, up to the answer."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """The two prompts have another salt each, so they share no state, whatever they say."""


ALIKE = Alike()
Comparison = Parting | Alike | OtherModel | Unlike | Unknown


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt of a tenant, the `request_id` of its request and what its caller calls that. Only
    prompts with one salt and adapter share any state."""

    tenant: str
    request_id: str
    name: str
    salt: bytes
    adapter: str
    prompt: LocatedPrompt

    @classmethod
    def of(cls, asked: TokenizedRequest) -> KeptPrompt:
        name = asked.caller.correlation_id or asked.request_id
        tenant, salt, adapter = asked.tenant.name, asked.key_salt, asked.adapter
        return cls(tenant, asked.request_id, name, salt, adapter, asked.located)

    def may_share(self, other: KeptPrompt) -> bool:
        """Whether the two may have cached state in common."""
        return (self.salt, self.adapter) == (other.salt, other.adapter)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)


class RecentPrompts:
    """Keeps `per_tenant` prompts of each, and of all together so many that they have `max_tokens`
    at most. `decode` makes text of token ids."""

    def __init__(self, per_tenant: int, decode: Decode, max_tokens: int = MAX_TOKENS) -> None:
        self._per_tenant, self._max_tokens, self._decode = per_tenant, max_tokens, decode
        # By tenant, then by request id; all of them in `_order`. The latest are last.
        self._kept: dict[str, OrderedDict[str, KeptPrompt]] = {}
        self._order: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, asked: TokenizedRequest) -> None:
        """Keeps a prompt, and gives up the oldest ones beyond the bounds."""
        new = KeptPrompt.of(asked)
        if not self._per_tenant or new.num_tokens > self._max_tokens:
            return
        self._remove(new.tenant, new.request_id)
        of_tenant = self._kept.setdefault(new.tenant, OrderedDict())
        of_tenant[new.request_id] = new
        self._order[new.tenant, new.request_id] = None
        self.num_tokens += new.num_tokens
        if len(of_tenant) > self._per_tenant:
            self._remove(new.tenant, next(iter(of_tenant)))
        while self.num_tokens > self._max_tokens:
            self._remove(*next(iter(self._order)))

    def _remove(self, tenant: str, request_id: str) -> None:
        of_tenant = self._kept.get(tenant, OrderedDict())
        if (removed := of_tenant.pop(request_id, None)) is None:
            return
        del self._order[tenant, request_id]
        self.num_tokens -= removed.num_tokens
        if not of_tenant:
            del self._kept[tenant]

    def of(self, tenant: str, request_id: str) -> KeptPrompt | None:
        """The prompt of a tenant's request, if it is kept."""
        return self._kept.get(tenant, OrderedDict()).get(request_id)

    def places(self, tenant: str, request_id: str) -> tuple[NamedPlace, ...]:
        """The named parts of a prompt that is kept; none of another."""
        kept = self.of(tenant, request_id)
        return kept.prompt.places if kept is not None else ()

    def nearest(self, asked: TokenizedRequest) -> Parting:
        """The place at which a prompt parts from the one that is most like it, the latest of
        several. NOT_PARTED if it begins as that one does, or there is none."""
        new = KeptPrompt.of(asked)
        kept = reversed(self._kept.get(new.tenant, OrderedDict()).values())
        others = [other for other in kept if other.may_share(new)]
        if not others:
            return NOT_PARTED
        lengths = [_num_alike(new, other) for other in others]
        longest = max(lengths)
        comparison = self._compared(new, others[lengths.index(longest)], longest)
        return comparison if isinstance(comparison, Parting) else NOT_PARTED

    def with_named(self, asked: TokenizedRequest, request_id: str) -> Comparison:
        """The difference between a prompt and that of the tenant's request of this id."""
        new = KeptPrompt.of(asked)
        other = self.of(new.tenant, request_id)
        if other is None:
            return Unknown()
        if other.adapter != new.adapter:
            return OtherModel(min(new.num_tokens, other.num_tokens))
        if other.salt != new.salt:
            return Unlike()
        return self._compared(new, other, _num_alike(new, other))

    def _compared(self, new: KeptPrompt, other: KeptPrompt, position: int) -> Comparison:
        """Two prompts with so many first tokens in common. The words that a template writes after
        the last message are no part of the next prompt."""
        if position >= min(new.num_tokens, other.prompt.end_of_messages):
            return ALIKE
        ours, theirs = new.prompt.token_ids, other.prompt.token_ids
        before, after = slice(max(0, position - SHOWN_TOKENS), position), slice(position, None)
        return Parting(
            request_id=other.name,
            position=position,
            place=new.prompt.place_of(position),
            missed_tokens=min(new.num_tokens, other.num_tokens) - position,
            before=self._text(ours[before])[-SHOWN_CHARS:],
            ours=self._text(ours[after])[:SHOWN_CHARS],
            theirs=self._text(theirs[after])[:SHOWN_CHARS],
        )

    def _text(self, token_ids: TokenIds) -> str:
        return self._decode(token_ids[:SHOWN_TOKENS].tolist())


def _num_alike(new: KeptPrompt, other: KeptPrompt) -> int:
    return common_length(new.prompt.token_ids, other.prompt.token_ids)
