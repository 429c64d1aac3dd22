"""Panels of a product taken by other threads: the same bits, whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ferryman_kernels import _panel_threads as threads
from ferryman_kernels import packed_product as products
from ferryman_kernels._compiled import Loop
from ferryman_kernels._packed_product_compiled import packed_product_compiled
from ferryman_kernels._panel_threads import PanelThreads
from ferryman_kernels.packed_product import Panels, packed_product, panels_of

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 32), (131, 1500), (1000, 70)]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def drawn(shape: tuple[int, int], tokens: int, dtype: torch.dtype) -> tuple[Tensor, Panels, Tensor]:
    """x, the panels of a weight, and a bias."""
    generator = torch.Generator().manual_seed(tokens + shape[0])
    x, weight = (torch.randn(n, shape[1], generator=generator) for n in (tokens, shape[0]))
    weight = weight.to(dtype)
    panels = panels_of(torch.ops.mkldnn._reorder_linear_weight(weight), weight)
    if panels is None:
        pytest.skip("this processor's layout of a packed weight is another")
    return x.to(dtype), panels, torch.randn(shape[0], generator=generator).to(dtype)


def given(drawing: tuple[Tensor, Panels, Tensor]) -> tuple[Tensor, int, int, Tensor, int]:
    x, panels, bias = drawing
    return x, panels.address, panels.panel_bytes, bias, panels.out_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_products_in_turn_have_the_bits_of_one_thread(dtype: torch.dtype) -> None:
    drawings = [drawn(shape, tokens, dtype) for shape in SHAPES for tokens in (1, 3, 8)]
    expected = [packed_product_compiled(*given(each)) for each in drawings]
    shared = PanelThreads(dtype, 3)
    for _ in range(60):
        for drawing, one in zip(drawings, expected, strict=True):
            found = shared.product(*given(drawing))
            assert found is not None
            assert torch.equal(found, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loop_of_the_threads_computes_every_panel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called here in place of the caller's own, so that the caller computes none."""
    monkeypatch.setattr(Thread, "start", lambda self: None)
    monkeypatch.setattr(threads, "_share_loop", ServingLoop())
    drawing = drawn((1000, 70), 3, dtype)
    found = PanelThreads(dtype, 1).product(*given(drawing))
    assert found is not None
    assert torch.equal(found, packed_product_compiled(*given(drawing)))


class ServingLoop:
    """Publishes a job, and takes its panels as the other threads do."""

    def alone(self, *job: Any) -> None:
        *types, words, panels = job
        _publish_loop.alone(words, panels)
        threads._serve_loop.alone(*types, words, 1)
        assert words[threads.DONE] == panels


def _publish(words: Any, panels: int) -> None:
    threads.publish(words, panels)


_publish_loop = Loop(_publish)


def test_a_thread_that_never_wakes_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "start", lambda self: None)
    asleep = PanelThreads(torch.float32, 1)
    drawing = drawn((1000, 70), 1, torch.float32)
    for _ in range(3):
        found = asleep.product(*given(drawing))
        assert found is not None
        assert torch.equal(found, packed_product_compiled(*given(drawing)))


def test_after_a_thread_lost_its_core_products_are_computed_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawing = drawn((64, 32), 1, torch.float32)
    shared = PanelThreads(torch.float32, 1)
    assert shared.product(*given(drawing)) is not None
    monkeypatch.setattr(threads, "DISPLACED", -1)
    monkeypatch.setattr(threads, "ALONE", 3)
    found = [shared.product(*given(drawing)) is not None for _ in range(9)]
    assert found == [True, False, False, False] * 2 + [True]


def test_a_second_caller_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, panels, bias = drawn((1000, 70), 1, torch.float32)
    busy = PanelThreads(torch.float32, 1)
    monkeypatch.setattr(products, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(products, "panel_threads", lambda dtype: busy)
    expected = packed_product_compiled(*given((x, panels, bias)))
    assert torch.equal(packed_product(x, panels, bias), expected)
    with busy.own:
        assert busy.product(*given((x, panels, bias))) is None
        assert torch.equal(packed_product(x, panels, bias), expected)


def test_no_panel_is_given_twice() -> None:
    words = np.zeros(threads.ASLEEP, np.int64)
    for panels in (3, 1, 5):
        found = np.full(7, -2)
        _take_loop.alone(words, panels, found)
        assert found.tolist() == [*range(panels), *[-1] * (7 - panels)]


def _take_all(words: Any, panels: int, found: np.ndarray) -> None:
    threads.publish(words, panels)
    for i in range(len(found)):
        found[i] = threads.taken(words)


_take_loop = Loop(_take_all)


def test_one_thread_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    assert threads.panel_threads(torch.float32) is None
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_MAY_SPIN", False)
    assert threads.panel_threads(torch.float32) is None
