"""The page keys of one request, for each kind of state that some worker keeps. Pure."""

from __future__ import annotations

from ferryman.cache.keys import PageKey, TokenIds, extend_keys, root_key
from ferryman.wire.beats import ServedState


class Chains:
    """Computes a chain of keys once, when a worker with that state is first considered."""

    def __init__(self, token_ids: TokenIds, tenant_salt: bytes) -> None:
        self._token_ids, self._salt = token_ids, tenant_salt
        self._known: dict[ServedState, tuple[PageKey, ...]] = {}

    @property
    def token_ids(self) -> TokenIds:
        return self._token_ids

    def of(self, state: ServedState) -> tuple[PageKey, ...]:
        """The keys of all full pages; usually the whole fleet has one state."""
        found = self._known.get(state)
        if found is None:
            root = root_key(state, self._salt)
            found = extend_keys(root, (), self._token_ids, state.page_size)
            self._known[state] = found
        return found

    def extended(self, token_ids: TokenIds) -> Chains:
        """The chains of a longer list that begins with this one's tokens."""
        longer = Chains(token_ids, self._salt)
        for state, known in self._known.items():
            root = root_key(state, self._salt)
            longer._known[state] = extend_keys(root, known, token_ids, state.page_size)
        return longer
