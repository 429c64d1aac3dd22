"""What a prefill worker has of a prompt of n tokens once it is computed, as absolute ranges.

Decode asks for a part of this, because it holds the rest; the two lists may differ at either end.
"""

from __future__ import annotations

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.cache.resume import resume_set
from ferryman.handoff.values import PageRange


def offered_ranges(manifest: StateManifest, prompt_len: int) -> tuple[PageRange, ...]:
    """The resume set of n: its pages, the last of them partial, and the state at n."""
    needs = resume_set(manifest, prompt_len)
    spans = {
        Kind.FULL: needs.full,
        Kind.WINDOW: needs.window,
        Kind.RECURRENT: (prompt_len, prompt_len + 1),
    }
    ranges = [(kind, *spans[kind]) for kind in manifest.kinds]
    return tuple(PageRange(kind, first, end) for kind, first, end in ranges if first < end)
