"""How many tokens of a prompt came from a cache, counted once for both workers.

    prompt     |============================|
    prefill    |##### device ##|## host #|       reused before it computed
    decode     |#############################|   reused instead of received: may overlap all of it

A token that both workers had counts where prefill had it; decode adds only what lies beyond, and
the sum never exceeds the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Tokens of the prompt's beginning that were not computed, by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


def count_once(prompt_len: int, prefill: CachedTokens, decode_len: int) -> CachedTokens:
    """Prefill's tokens, and what decode had on its device beyond them."""
    assert prefill.total <= prompt_len, "prefill reuses at most the prompt"
    beyond = max(0, min(decode_len, prompt_len) - prefill.total)
    return CachedTokens(prefill.device + beyond, prefill.host, prefill.storage)
