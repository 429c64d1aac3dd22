"""The storage tier over a real folder: what was stored is read back byte for byte, or is a miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.hostcache.stored import opened, prompt_with, read_all
from tests.tiers.state_shapes import chain, manifest_of

from ferryman.cache.manifest import Kind

HYBRID = manifest_of(Kind.FULL, Kind.WINDOW, Kind.RECURRENT)
SHAPES = [
    pytest.param(HYBRID, id="hybrid"),
    pytest.param(manifest_of(Kind.FULL), id="full only"),
    pytest.param(manifest_of(Kind.RECURRENT), id="recurrent only"),
]


async def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    prompt = prompt_with(HYBRID, chain(1, 2, 3, 4), snapshots=[1, 3])
    async with opened(tmp_path) as storage:
        storage.attach(HYBRID)
        stored = await storage.store(prompt.keys, prompt.offers())
        assert (stored.num_stored, stored.is_truncated) == (len(prompt.units), False)
        assert storage.lookup(prompt.keys).usable_pages == 4
        assert await read_all(storage, prompt) == prompt.units
