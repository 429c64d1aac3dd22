"""The tokens of a prompt that were not computed, by the tier their state came from.

Prefill and decode count for themselves. State that decode held already was not sent, but prefill
computed it all the same unless it held it too. So what was saved is prefill's count alone, and it
never exceeds the prompt; decode's says on whose pages the answer stands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens of the prompt's beginning that were not computed, by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage + self.peer

    @property
    def by_tier(self) -> dict[str, int]:
        """The counts under the tiers' names, the nearest tier first."""
        return {
            "device": self.device,
            "host": self.host,
            "storage": self.storage,
            "peer": self.peer,
        }

    def at_most(self, num_tokens: int) -> CachedTokens:
        """The first `num_tokens` of them: tokens of the nearest tiers are kept."""
        kept = []
        for tokens in (self.device, self.host, self.storage, self.peer):
            kept.append(min(tokens, num_tokens))
            num_tokens -= kept[-1]
        return CachedTokens(*kept)


NONE_CACHED = CachedTokens()
