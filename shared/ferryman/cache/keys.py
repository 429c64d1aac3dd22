"""Page keys: the chained 128-bit names of pages.

    key(page) = H(key(parent page) ‖ tokens of the page as little-endian u32)
    key(root) = H(model fingerprint ‖ page size ‖ state layout ‖ tenant salt)

H is blake2b with a 16-byte digest (RFC 7693); the root of state that a LoRA adapter has computed is
hashed with the adapter's digest as the key. Two equal keys mean equal tokens from position 0 on, an
equal model and adapter, an equal layout and an equal tenant.

vLLM calls this the hash of a KV block.
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


class KeyedModel(Protocol):
    """The fields of a state manifest that enter the keys; a router knows only these."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def digest(self) -> str: ...


def root_key(manifest: KeyedModel, tenant_salt: bytes = b"", adapter: str = "") -> PageKey:
    """The key above a tenant's first pages. A different salt, or another adapter, changes every
    key. `adapter` is the hex digest of its content; empty for the model alone."""
    name = f"{manifest.fingerprint}|{manifest.page_size}|{manifest.digest}|".encode()
    # The adapter is blake2b's key: so no salt that a tenant chooses can stand for an adapter.
    key = bytes.fromhex(adapter)
    return hashlib.blake2b(name + tenant_salt, digest_size=KEY_BYTES, key=key).digest()


def page_keys(root: PageKey, token_ids: TokenIds, page_size: int) -> tuple[PageKey, ...]:
    """Keys of all full pages of `token_ids` [tokens]; a partial last page has no key."""
    return extend_keys(root, (), token_ids, page_size)


def prompt_key(parent: PageKey, rest: TokenIds) -> PageKey:
    """The name of a whole prompt: `parent` is the key of its last full page, or the root if it
    has none; `rest` are the tokens after that page [0 to page size - 1]. It is no page's key."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    digest.update(as_token_ids(rest).data.cast("B") if len(rest) else b"")
    return digest.digest()


def extend_keys(
    root: PageKey, first_keys: tuple[PageKey, ...], token_ids: TokenIds, page_size: int
) -> tuple[PageKey, ...]:
    """Continues `first_keys`, those of the first pages of `token_ids`, to all its full pages."""
    blake2b, page_bytes = hashlib.blake2b, page_size * 4
    raw = as_token_ids(token_ids).data.cast("B")
    keys, parent = list(first_keys), first_keys[-1] if first_keys else root
    for end in range((len(first_keys) + 1) * page_bytes, len(raw) + 1, page_bytes):
        digest = blake2b(parent, digest_size=KEY_BYTES)
        digest.update(raw[end - page_bytes : end])
        parent = digest.digest()
        keys.append(parent)
    return tuple(keys)
