"""Small manifests and key chains for the host tier's tests."""

from __future__ import annotations

from ferryman.cache.keys import PageKey, as_token_ids, page_keys, root_key
from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out

PAGE_SIZE = 4

_SPECS = {
    Kind.FULL: (SectionSpec("key", 0, (2, PAGE_SIZE, 8), "float32", 0),),
    Kind.WINDOW: (SectionSpec("key", 1, (1, PAGE_SIZE, 8), "float32", 0),),
    Kind.RECURRENT: (SectionSpec("ssm", 2, (4, 32), "float64", 0),),
}


def manifest_of(*kinds: Kind, fingerprint: str = "tiny") -> StateManifest:
    """A manifest with these kinds; a window is two pages long."""
    layouts = tuple(lay_out(kind, _SPECS[kind]) for kind in kinds)
    window_len = 2 * PAGE_SIZE if Kind.WINDOW in kinds else 0
    return StateManifest(fingerprint, PAGE_SIZE, PAGE_SIZE, window_len, layouts)


def chain(*pages: int, salt: bytes = b"") -> tuple[PageKey, ...]:
    """Keys of a prompt whose page i repeats the number pages[i]."""
    token_ids = as_token_ids([token for page in pages for token in [page] * PAGE_SIZE])
    return page_keys(root_key(manifest_of(Kind.FULL), salt), token_ids, PAGE_SIZE)
