"""Page keys depend on tokens, model, layout and tenant; manifests name their differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.manifests import small_manifest

from ferryman.cache.keys import as_token_ids, extend_keys, page_keys, root_key
from ferryman.cache.manifest import (
    Kind,
    SectionSpec,
    StateManifest,
    lay_out,
    manifest_from_json,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS, st.integers(0, 10))
def test_keys_are_the_same_however_far_they_were_known(tokens: list[int], known: int) -> None:
    root, ids = root_key(small_manifest(Kind.FULL)), as_token_ids(tokens)
    keys = page_keys(root, ids, 4)
    assert len(keys) == len(tokens) // 4
    assert extend_keys(root, keys[:known], ids, 4) == keys


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_tokens_from_the_start(left: list[int], right: list[int]) -> None:
    root = root_key(small_manifest(Kind.FULL))
    pairs = zip(
        page_keys(root, as_token_ids(left), 4),
        page_keys(root, as_token_ids(right), 4),
        strict=False,
    )
    for page, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (left[: page * 4] == right[: page * 4])


def test_another_tenant_model_or_page_size_has_another_root() -> None:
    manifest = small_manifest(Kind.FULL)
    roots = {
        root_key(manifest),
        root_key(manifest, b"tenant"),
        root_key(replace(manifest, fingerprint="other")),
        root_key(small_manifest(Kind.FULL, page_size=8)),
        root_key(small_manifest(Kind.FULL, Kind.RECURRENT)),
    }
    assert len(roots) == 5


def test_an_adapter_has_another_root_that_no_salt_can_stand_for() -> None:
    manifest, one, two = small_manifest(), "1" * 32, "2" * 32
    salts = [b"", b"t", one.encode(), bytes.fromhex(one)]
    roots = [root_key(manifest, salt, adapter) for adapter in ("", one, two) for salt in salts]
    assert len(set(roots)) == len(roots)
    assert root_key(manifest, b"t", "") == root_key(manifest, b"t")


def test_a_key_chain_of_a_transposed_view_hashes_the_values_not_the_memory() -> None:
    root, ids = root_key(small_manifest(Kind.FULL)), np.arange(16, dtype=np.int64)
    strided = np.stack([ids, ids], axis=1)[:, 0]
    assert page_keys(root, as_token_ids(strided), 4) == page_keys(root, as_token_ids(ids), 4)


def test_a_manifest_survives_json_and_keeps_its_digest() -> None:
    manifest = small_manifest(Kind.FULL, Kind.WINDOW, Kind.RECURRENT, window_len=6)
    again = manifest_from_json(manifest.text)
    assert again == manifest
    assert again.digest == manifest.digest
    assert manifest.differences(again) == ()
    assert manifest.text is manifest.text, "each hand-off carries it, so it is made once"


def test_a_manifest_of_rows_of_one_position_has_the_digest_that_it_always_had() -> None:
    """State in tiers is found by it. Rows of several positions are another layout."""
    specs = {
        Kind.FULL: SectionSpec("key", 0, (2, 16, 4), "float32", 0),
        Kind.RECURRENT: SectionSpec("conv", 1, (8, 3), "float32", 0, (("x", 6), ("B", 2))),
    }
    layouts = tuple(lay_out(kind, [spec]) for kind, spec in specs.items())
    manifest = StateManifest("f", 16, 1, 0, layouts)
    assert manifest.digest == "8f73970d57bc2ddcfff7c8e3d5fe1443"
    blocks = lay_out(Kind.FULL, [replace(specs[Kind.FULL], positions_a_row=4)])
    other = replace(manifest, layouts=(blocks, layouts[1]))
    assert other.digest != manifest.digest
    assert manifest.differences(other) == ("full key of layer 0: positions_a_row 1 here, 4 there",)
    again = manifest_from_json(other.text)
    assert (again, again.digest) == (other, other.digest)


def test_differences_name_the_section_that_differs() -> None:
    manifest = small_manifest(Kind.FULL, Kind.RECURRENT)
    bigger = lay_out(Kind.FULL, [SectionSpec("key", 0, (2, 4, 4), "float32", 0)])
    other = replace(manifest, layouts=(bigger, manifest.layout(Kind.RECURRENT)))
    (line,) = manifest.differences(other)
    assert line.startswith("full key of layer 0")


def test_sections_are_aligned_and_slots_hold_whole_sections() -> None:
    layout = lay_out(Kind.FULL, [SectionSpec("key", i, (3, 5), "bfloat16", 0) for i in range(3)])
    assert [section.offset for section in layout.sections] == [0, 64, 128]
    assert layout.slot_bytes == 192


def test_parts_of_a_section_follow_each_other_without_padding() -> None:
    one = SectionSpec("in", 3, (5, 6), "bfloat16", 0)
    parts = replace(one, parts=(("gate", 1), ("up", 4)))
    first, (gate, up) = *one.placed(64), tuple(parts.placed(64))
    assert (first.offset, first.dtype, first.shape) == (64, "bfloat16", (5, 6))
    assert (gate.name, gate.layer, gate.shape, gate.offset) == ("in.gate", 3, (1, 6), 64)
    assert (up.name, up.layer, up.shape, up.offset) == ("in.up", 3, (4, 6), 64 + 12)
    assert {gate.dtype, up.dtype} == {"bfloat16"}
    assert one.num_bytes == gate.num_bytes + up.num_bytes


@pytest.mark.parametrize("page_size", [-4, 0, 3, 6])
def test_a_page_is_a_power_of_two(page_size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        replace(small_manifest(Kind.RECURRENT), page_size=page_size, scan_chunk=1)


def test_a_scan_grid_that_does_not_divide_the_page_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        replace(small_manifest(Kind.RECURRENT), scan_chunk=3)
