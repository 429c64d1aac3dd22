"""The manifest of a model, and the views of its layers on a slab."""

from __future__ import annotations

import pytest
import torch
from tests.model.conftest import FolderOf
from tests.tiny_models import VARIANTS

from ferryman.cache.manifest import (
    Kind,
    StateManifest,
    manifest_from_json,
)
from ferryman.engine.memory.slabs import Slabs
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import scan_block, state_manifest
from ferryman.model.shapes.state import section_view, state_views

DTYPES = ("float32", "bfloat16", "float64")
NUM_SLOTS = {Kind.FULL: 3, Kind.RECURRENT: 2}


@pytest.fixture
def manifests(folder_of: FolderOf) -> dict[str, StateManifest]:
    """Every variant's manifest in bfloat16, by name."""
    return {
        variant: state_manifest(load_config(folder_of(variant)), "bfloat16", 16, "fingerprint")
        for variant in VARIANTS
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_byte_of_a_section_belongs_to_it_alone(
    variant: str, dtype: str, folder_of: FolderOf
) -> None:
    manifest = state_manifest(load_config(folder_of(variant)), dtype, 16, "fingerprint")
    slabs = Slabs.allocate(manifest, NUM_SLOTS, "cpu")
    for kind in manifest.kinds:
        layout = manifest.layout(kind)
        for section in layout.sections:
            slabs.by_kind[kind].tensor.zero_()
            section_view(slabs.by_kind[kind].tensor, section)[1] = 1
            written = slabs.by_kind[kind].tensor != 0
            begin, end = section.offset, section.offset + section.num_bytes
            assert not written[0].any()
            assert written[1, begin:end].any()
            assert not written[1, :begin].any()
            assert not written[1, end:].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_view_covers_x_B_and_C_of_a_convolution(
    variant: str, manifests: dict[str, StateManifest]
) -> None:
    manifest = manifests[variant]
    slabs = Slabs.allocate(manifest, NUM_SLOTS, "cpu")
    layout, slab = manifest.layout(Kind.RECURRENT), slabs.tensors[Kind.RECURRENT]
    for layer, conv_states in state_views(manifest, slabs.tensors).conv.items():
        parts = []
        for number, name in enumerate(("conv.x", "conv.B", "conv.C")):
            view = section_view(slab, layout.section(name, layer))
            view.fill_(number)
            parts.append(view)
        assert torch.equal(conv_states, torch.cat(parts, dim=1))


def test_views_are_views(manifests: dict[str, StateManifest]) -> None:
    slabs = Slabs.allocate(manifests["bamba"], NUM_SLOTS, "cpu")
    state = state_views(manifests["bamba"], slabs.tensors)
    assert sorted(state.attention) == [1, 4]
    assert sorted(state.conv) == sorted(state.ssm) == [0, 2, 3]
    assert state.ssm[0].isnan().all()
    state.ssm[2][1] = 0
    layout = manifests["bamba"].layout(Kind.RECURRENT)
    section = layout.section("ssm", 2)
    found = slabs.bytes_of(Kind.RECURRENT, 1)[section.offset : section.offset + section.num_bytes]
    assert not any(found)


def test_recurrent_states_are_kept_in_the_precision_of_the_scan(
    manifests: dict[str, StateManifest], folder_of: FolderOf
) -> None:
    layout = manifests["bamba"].layout(Kind.RECURRENT)
    assert layout.section("conv.x", 0).dtype == "bfloat16"
    assert layout.section("ssm", 0).dtype == "float32"
    wide = state_manifest(load_config(folder_of("bamba")), "float64", 16, "fingerprint")
    assert wide.layout(Kind.RECURRENT).section("ssm", 0).dtype == "float64"


@pytest.mark.parametrize(("page_size", "scan_chunk"), [(16, 16), (64, 64), (256, 64)])
def test_the_scan_chunk_divides_the_page(
    page_size: int, scan_chunk: int, folder_of: FolderOf
) -> None:
    manifest = state_manifest(load_config(folder_of("bamba")), "float32", page_size, "f")
    assert manifest.scan_chunk == scan_chunk


def test_blocks_of_a_scan_are_as_long_for_small_pages_as_for_large_ones(
    folder_of: FolderOf,
) -> None:
    config = load_config(folder_of("bamba"))
    blocks = {scan_block(state_manifest(config, "float32", page, "f")) for page in (16, 64, 256)}
    assert blocks == {64}, "blocks of a page halved the speed of a card"


def test_where_bits_are_promised_a_scan_may_be_cut_after_any_token(folder_of: FolderOf) -> None:
    config, arithmetic = load_config(folder_of("bamba")), "cpu/avx512/float32/r1/tp1"
    manifest = state_manifest(config, "float32", 16, "f", arithmetic=arithmetic)
    assert manifest.scan_chunk == scan_block(manifest) == 1


def test_a_manifest_survives_its_json(manifests: dict[str, StateManifest]) -> None:
    for manifest in manifests.values():
        assert manifest_from_json(manifest.text) == manifest
        assert manifest_from_json(manifest.text).digest == manifest.digest
