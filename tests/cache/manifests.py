"""Small manifests for tests of the pure core."""

from __future__ import annotations

from ferryman.cache.manifest import Kind, SectionSpec, StateManifest, lay_out


def small_manifest(*kinds: Kind, page_size: int = 4, window_len: int = 0) -> StateManifest:
    """One tiny section a kind; the core does not depend on its size."""
    specs = {
        Kind.FULL: SectionSpec("key", 0, (1, page_size, 4), "float32", 0),
        Kind.WINDOW: SectionSpec("key", 1, (1, page_size, 4), "float32", 0),
        Kind.RECURRENT: SectionSpec("ssm", 2, (2, 4, 4), "float32", 0),
    }
    layouts = tuple(lay_out(kind, [specs[kind]]) for kind in kinds)
    return StateManifest("test-model", page_size, page_size, window_len, layouts)
