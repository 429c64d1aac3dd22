"""Workers whose manifests differ are refused at Reserve; the error has both values of the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.pair import MANIFEST, pair_of_workers, request

from ferryman.cache.manifest import Kind, StateManifest
from ferryman.errors import ManifestMismatch


def with_pages_of(num_tokens: int) -> StateManifest:
    return replace(MANIFEST, page_size=num_tokens, scan_chunk=num_tokens)


def in_dtype(dtype: str) -> StateManifest:
    """The manifest with another dtype; a real one would have another fingerprint too."""
    kind = MANIFEST.kinds[0]
    layout = MANIFEST.layout(kind)
    sections = tuple(replace(section, dtype=dtype) for section in layout.sections)
    return replace(MANIFEST, layouts=(replace(layout, sections=sections), *MANIFEST.layouts[1:]))


OTHERS = {
    "page size": (with_pages_of(8), f"page_size: {MANIFEST.page_size} here, 8 there"),
    "model": (
        replace(MANIFEST, fingerprint="another"),
        f"fingerprint: {MANIFEST.fingerprint} here, another there",
    ),
    "dtype": (
        in_dtype("bfloat16"),
        f"dtype {MANIFEST.layout(Kind.FULL).sections[0].dtype} here, bfloat16 there",
    ),
    "arithmetic": (
        replace(MANIFEST, arithmetic="cpu/avx512.znver4/float32/r2965f0ee/tp1"),
        "arithmetic: any here, cpu/avx512.znver4/float32/r2965f0ee/tp1 there",
    ),
    "keys kept as codes": (
        in_dtype("float8_e4m3fn"),
        f"dtype {MANIFEST.layout(Kind.FULL).sections[0].dtype} here, float8_e4m3fn there",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_prefill_worker_whose_state_differs_is_refused_with_both_values(what: str) -> None:
    other, words = OTHERS[what]
    async with pair_of_workers() as pair:
        wish = pair.wish(request("r1", [1] * 13))
        theirs = replace(wish, manifest_digest=other.digest, manifest_json=other.text)
        with pytest.raises(ManifestMismatch, match=words):
            await pair.reserve(theirs)
        assert not pair.decode.leased()
        await pair.reserve(wish)
