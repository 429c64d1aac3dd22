"""Page keys: the chained 128-bit names of pages.

    key(page) = H(key(parent page) ‖ tokens of the page as little-endian u32)
    key(root) = H(model fingerprint ‖ page size ‖ state layout ‖ tenant salt)

H is blake2b with a 16-byte digest (RFC 7693). Two equal keys mean equal tokens from position 0 on,
an equal model, an equal layout and an equal tenant.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

PageKey = bytes
KEY_BYTES = 16

TokenIds = NDArray[np.uint32]


def as_token_ids(token_ids: ArrayLike) -> TokenIds:
    """Token ids as little-endian u32, the only form in which they are hashed or sent."""
    return np.ascontiguousarray(token_ids, dtype="<u4")


class Named(Protocol):
    """What of a state manifest goes into keys; a router knows no more of it than this."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def digest(self) -> str: ...


def root_key(manifest: Named, tenant_salt: bytes = b"") -> PageKey:
    """The key above a tenant's first pages. Another salt makes every key another."""
    name = f"{manifest.fingerprint}|{manifest.page_size}|{manifest.digest}|".encode()
    return hashlib.blake2b(name + tenant_salt, digest_size=KEY_BYTES).digest()


def page_keys(root: PageKey, token_ids: TokenIds, page_size: int) -> tuple[PageKey, ...]:
    """Keys of all full pages of `token_ids` [tokens]; a partial last page has no key."""
    return extend_keys(root, (), token_ids, page_size)


def extend_keys(
    root: PageKey, known: tuple[PageKey, ...], token_ids: TokenIds, page_size: int
) -> tuple[PageKey, ...]:
    """Continues `known`, the keys of the first pages of `token_ids`, to all its full pages."""
    blake2b, page_bytes = hashlib.blake2b, page_size * 4
    raw = as_token_ids(token_ids).data.cast("B")
    keys, parent = list(known), known[-1] if known else root
    for end in range((len(known) + 1) * page_bytes, len(raw) + 1, page_bytes):
        digest = blake2b(parent, digest_size=KEY_BYTES)
        digest.update(raw[end - page_bytes : end])
        parent = digest.digest()
        keys.append(parent)
    return tuple(keys)
