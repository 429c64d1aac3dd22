"""Memory for weights: whose pages are asked for, what lies where, and when it goes back."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.native import native_config, save_native
from torch import Tensor

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman_kernels.cpu import huge_pages
from ferryman_kernels.cpu.huge_pages import HUGE_PAGE_BYTES, WeightMemory, huge_memory, weight_zeros
from ferryman_kernels.products.packed_product import pack_panels, reads_panels

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has none"
)
REGION = 4 * HUGE_PAGE_BYTES


def mappings() -> Iterator[tuple[range, list[str]]]:
    """The addresses of each mapping of this process, and its flags (proc(5), smaps)."""
    addresses = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first == "VmFlags:":
            yield addresses, rest.split()
        elif not first.endswith(":"):
            begin, end = (int(side, 16) for side in first.split("-"))
            addresses = range(begin, end)


def asks_for_huge_pages(tensor: Tensor) -> bool:
    return any(tensor.data_ptr() in place and "hg" in flags for place, flags in mappings())


@needs_huge_pages
@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
def test_panels_lie_in_huge_pages() -> None:
    panels = pack_panels(torch.randn(70, 40))
    assert asks_for_huge_pages(panels.panels)
    assert not asks_for_huge_pages(torch.zeros(HUGE_PAGE_BYTES, dtype=torch.uint8))


@needs_huge_pages
def test_a_weight_of_a_processor_lies_in_huge_pages_and_no_other_does() -> None:
    assert asks_for_huge_pages(weight_zeros((3, 5), torch.bfloat16, torch.device("cpu")))
    assert weight_zeros((3, 5), torch.bfloat16, torch.device("meta")).is_meta


def test_memory_begins_with_a_huge_page_and_is_zero() -> None:
    tensor = torch.frombuffer(huge_memory(3 * mmap.PAGESIZE), dtype=torch.uint8)
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert len(tensor) == 3 * mmap.PAGESIZE
    assert not tensor.any()


def test_weights_of_one_region_do_not_overlap() -> None:
    memory = WeightMemory(REGION)
    shapes = [(3, 7), (1,), (5, 64), (0, 4), (HUGE_PAGE_BYTES,), (2, REGION), (9, 2)]
    weights = [memory.zeros(shape, torch.float32) for shape in shapes]
    for number, weight in enumerate(weights, start=1):
        assert not weight.any(), "nobody has written into it"
        weight.fill_(number)
    for number, (weight, shape) in enumerate(zip(weights, shapes, strict=True), start=1):
        assert weight.shape == shape
        assert (weight == number).all()
        assert weight.numel() == 0 or weight.data_ptr() % 64 == 0
        assert weight.untyped_storage().nbytes() == weight.nbytes, "others are none of its bytes"


def watched_regions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """The regions that are made from now on."""
    regions: list[weakref.ref[mmap.mmap]] = []

    def watched(num_bytes: int) -> memoryview:
        content = huge_memory(num_bytes)
        regions.append(weakref.ref(content.obj))  # type: ignore[arg-type]
        return content

    monkeypatch.setattr(huge_pages, "huge_memory", watched)
    return regions


def test_a_region_goes_back_with_its_last_weight_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    regions = watched_regions(monkeypatch)
    memory = WeightMemory(REGION)
    first, second = (memory.zeros((REGION // 2,), torch.uint8) for _ in range(2))
    beyond = memory.zeros((1,), torch.uint8)
    second.fill_(7)
    del first
    assert regions[0]() is not None
    assert (second == 7).all()
    del second
    assert [region() is None for region in regions] == [True, False]
    assert not beyond.any(), "it lies in the next region"


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
def test_models_share_no_region_and_layers_of_a_model_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_native(tmp_path, native_config())
    regions = watched_regions(monkeypatch)
    monkeypatch.delattr(huge_pages, "_memory_of_process")  # nor one with weights of no model
    models = [load_model(folder, LoadOptions("float32")) for _ in range(3)]
    assert len(regions) == len(models)
    del models[1]
    gc.collect()
    assert [region() is None for region in regions] == [False, True, False]
