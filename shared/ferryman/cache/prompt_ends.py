"""Prompt ends: the last state of a prompt, frozen, so that several requests decode from it.

Requests with one prompt, as the choices of one answer are (`n`), share its full pages by reference,
through the prefix tree. The rest of resume_set(n) is written by each of them: the page that the
prompt fills in part, the pages of the window, the recurrent state. So the slots that a hand-off has
written are frozen here, and each request decodes on copies of them.

    hand-off of the first request ──► frozen slots ─┬─ copied for that request itself
                                                    ├─ copied for its sibling: nothing is sent
                                                    └─ …

An end is a cache: it is dropped when its last sibling has come, after a while, or when its slots
are needed. A sibling that comes later is handed off whole. vLLM and SGLang run all choices in one
process, and a fork copies the last block alone (copy-on-write).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferryman.cache.keys import PageKey
from ferryman.cache.manifest import Kind
from ferryman.cache.slots import Holder, Pools, Role, SlotHandle

# Siblings may wait for their turn in the router, and at prefill.
KEPT_SECONDS = 30.0
PROMPT_END = Holder(Role.PROMPT_END, "")

UnitSlots = Mapping[tuple[Kind, int], SlotHandle]
"""Slots by kind and index: a page, or the position of a recurrent state."""


@dataclass(slots=True)
class PromptEnd:
    """The frozen `units` of one prompt. `first` is the key of its first page; its own key if it
    fills none. `num_awaited` siblings are to come; it is dropped at `until` [seconds] at latest."""

    first: PageKey
    units: UnitSlots
    num_awaited: int
    until: float


class PromptEnds:
    """All frozen ends of one worker, by the name of the whole prompt; the oldest first."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._ends: dict[PageKey, PromptEnd] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def keep(self, prompt: PageKey, end: PromptEnd, giver: Holder) -> None:
        """Freezes the slots; `giver` gives up its leases on them. No step in flight writes them.
        An earlier end of that prompt is dropped."""
        self._drop(prompt)
        self._pools.move(end.units.values(), giver, PROMPT_END)
        self._ends[prompt] = end

    def find(self, prompt: PageKey) -> UnitSlots | None:
        """The frozen units of exactly this prompt, or None."""
        end = self._ends.get(prompt)
        return end.units if end is not None else None

    def came(self, prompt: PageKey, num_siblings: int) -> None:
        """A request has leased what it copies; `num_siblings` more follow it. After the last one
        the end is dropped."""
        end = self._ends[prompt]
        end.num_awaited += num_siblings - 1
        if not end.num_awaited:
            self._drop(prompt)

    # Dropping.

    def expire(self, now: float) -> None:
        """Drops the ends whose siblings have not come in time."""
        for prompt in [prompt for prompt, end in self._ends.items() if end.until <= now]:
            self._drop(prompt)

    def drop_chain(self, first: PageKey) -> None:
        """Drops the ends of all prompts whose first page, or whose name, is `first`."""
        for prompt in [prompt for prompt, end in self._ends.items() if end.first == first]:
            self._drop(prompt)

    def drop_all(self) -> None:
        for prompt in list(self._ends):
            self._drop(prompt)

    def _drop(self, prompt: PageKey) -> None:
        end = self._ends.pop(prompt, None)
        if end is not None:
            self._pools.release(end.units.values(), PROMPT_END)

    # Counting.

    def num_idle(self) -> Counter[Kind]:
        """The slots of each kind that would be free if all ends went."""
        return Counter(
            handle.kind
            for handle in self.handles()
            if self._pools[handle.kind].holders(handle) == (PROMPT_END,)
        )

    def handles(self) -> Iterator[SlotHandle]:
        for end in self._ends.values():
            yield from end.units.values()
