"""The kernels name the processor that they were compiled for, and the revision of their sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

from ferryman_kernels.cpu import arithmetic
from ferryman_kernels.cpu._loop_cache import digest_of_sources
from ferryman_kernels.cpu.arithmetic import (
    TORCH,
    has_one_order,
    kernel_revision,
    processor_class,
)

Processor = Callable[..., None]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    """Lets the kernels stand on another processor. Nothing is compiled."""

    def chosen(*, panels: bool = True, dots: bool = False, tiles: bool = False) -> None:
        monkeypatch.setattr(arithmetic, "has_feature", lambda name: panels)
        monkeypatch.setattr(arithmetic, "HAS_DOTS", dots)
        monkeypatch.setattr(arithmetic, "has_tiles", lambda: tiles)
        monkeypatch.setattr(arithmetic, "compiled_for", lambda: ("znver4", "+avx512f,+sse2"))

    return chosen


def test_a_class_says_which_loops_multiply_and_for_which_processor(processor: Processor) -> None:
    processor(dots=True, tiles=True)
    assert processor_class(torch.bfloat16) == "amx-bf16.znver4"
    assert processor_class(torch.float32) == "avx512.znver4", "tiles multiply bfloat16 alone"
    processor(dots=True)
    assert processor_class(torch.bfloat16) == "avx512-bf16.znver4"
    processor()
    assert processor_class(torch.bfloat16) == "avx512.znver4"


def test_what_torch_multiplies_has_no_order(processor: Processor) -> None:
    processor(panels=False)
    for dtype in (torch.bfloat16, torch.float32):
        assert not has_one_order(dtype)
        assert processor_class(dtype) == TORCH
    processor()
    assert processor_class(torch.float64) == TORCH


def revision(*others: Path) -> str:
    digest_of_sources.cache_clear()
    return kernel_revision.__wrapped__(*others)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels in a folder that the test may change."""
    (tmp_path / "kernels" / "products").mkdir(parents=True)
    (tmp_path / "kernels" / "products" / "loop.py").write_text("1")
    monkeypatch.setattr(arithmetic, "__file__", str(tmp_path / "kernels" / "cpu" / "arithmetic.py"))
    return tmp_path


def test_a_changed_source_of_kernels_or_models_has_another_revision(sources: Path) -> None:
    model = sources / "model"
    model.mkdir()
    first = revision(model)
    assert revision(model) == first
    (sources / "kernels" / "products" / "loop.py").write_text("2")
    second = revision(model)
    (model / "norm.py").write_text("3")
    assert len({first, second, revision(model)}) == 3


@pytest.mark.parametrize(
    ("features", "is_the_same"),
    [("+avx512f,+pku", True), ("+avx512f", True), ("-avx512f,+pku", False)],
)
def test_a_processor_with_other_vectors_has_another_revision(
    sources: Path, monkeypatch: pytest.MonkeyPatch, features: str, is_the_same: bool
) -> None:
    monkeypatch.setattr(arithmetic, "compiled_for", lambda: ("icelake", "+avx512f,-pku"))
    before = revision()
    monkeypatch.setattr(arithmetic, "compiled_for", lambda: ("icelake", features))
    assert (revision() == before) == is_the_same


def test_another_compiler_has_another_revision(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = revision()
    monkeypatch.setattr(arithmetic, "version", lambda package: f"{package} of tomorrow")
    assert revision() != before


def test_the_sources_are_those_of_this_package() -> None:
    folders = {path.name for path in Path(arithmetic.__file__).parents[1].iterdir()}
    assert {"attention", "cpu", "elementwise", "products", "recurrence"} <= folders
    assert kernel_revision() == kernel_revision()
