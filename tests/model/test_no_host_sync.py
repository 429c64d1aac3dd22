"""A forward of every family asks its card for nothing: no number is read back on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.fake_card import CARD, HostSync, fake_card, without_waits
from tests.model.comparison import FAMILIES, random_config, swept
from tests.tiny_models import cleared_state, save_random
from tools.published_launches import launches_of
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.config import load_config
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.state import ModelState
from ferryman_kernels._triton import Kernel
from ferryman_kernels.ragged import on_device

PAGES, REQUESTS = 4, 3


@pytest.fixture(autouse=True)
def _fresh_tables() -> Iterator[None]:
    """Tables of a fake card must not stay in the cache of a real one."""
    on_device.cache_clear()
    yield
    on_device.cache_clear()


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=CARD)


def tables(model: Model, rows: int) -> dict[Kind, Tensor]:
    kinds = [kind for kind in model.manifest.kinds if kind is not Kind.RECURRENT]
    return {kind: whole(rows, PAGES) for kind in kinds}


def prefill(model: Model, state: ModelState) -> Tensor:
    """Chunks of several requests, behind earlier tokens and with a snapshot."""
    spans = ((0, 16), (16, 40), (7, 8))
    tokens = sum(end - start for start, end in spans)
    has_state = Kind.RECURRENT in model.manifest.kinds
    batch = PrefillBatch(
        whole(tokens),
        whole(tokens),
        whole(tokens),
        spans,
        tables(model, REQUESTS),
        whole(REQUESTS),
        ((1, 32, 5),) if has_state else (),
        whole(REQUESTS),
    )
    return model.prefill(batch, state).logits(batch.last_tokens)


def decode(model: Model, state: ModelState) -> Tensor:
    """Drafts too: the second wave is shorter."""
    slots = whole(5)
    batch = DecodeBatch(whole(5), whole(5), tables(model, 5), slots, slots, (3, 2), whole(5))
    return model.decode(batch, state)


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_a_forward_waits_for_nothing(family: str, tmp_path: Path) -> None:
    folder = save_random(tmp_path, random_config(family, 3), 3)
    with fake_card(), torch.inference_mode():
        model = load_model(folder, LoadOptions("bfloat16", CARD, page_size=16))
        state = cleared_state(model, CARD)
        for step, rows in ((prefill, REQUESTS), (decode, 5)):
            with without_waits():
                logits = step(model, state)
            assert logits.shape[0] == rows
            assert logits.device == CARD


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_whatever_a_forward_launches_is_compiled_for_published_shapes(
    family: str, tmp_path: Path
) -> None:
    """`tools/compile_kernels.py` has a launch of each kernel, so none is left out for a family."""
    folder = save_random(tmp_path, random_config(family, 3), 3)
    with fake_card(), torch.inference_mode():
        model = load_model(folder, LoadOptions("bfloat16", CARD, page_size=16))
        state = cleared_state(model, CARD)
        with noted_kernels() as launched:
            prefill(model, state)
            decode(model, state)
    with noted_kernels() as compiled:
        for launch, *sizes in launches_of(load_config(folder)):
            launch(torch.bfloat16, *sizes)
    assert launched
    assert launched <= compiled


@contextmanager
def noted_kernels() -> Iterator[set[str]]:
    """The names of kernels that are launched, and not run."""
    names = set[str]()

    def noted(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: names.add(kernel._function.__name__)

    with patch.object(Kernel, "__getitem__", noted):
        yield names


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "a truth": lambda x: bool(x[0] > 0),
    "a copy": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 0],
    "a mask written": lambda x: x.__setitem__(x > 0, 1.0),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "a list as an index": lambda x: x[[0, 1]],
    "a list to the card": lambda x: x + torch.tensor([1.0] * 4, device=CARD),
    "a plain upload": lambda x: torch.ones(4).to(CARD),
    "an upload that is not pinned": lambda x: torch.ones(4).to(CARD, non_blocking=True),
    "a blocking upload": lambda x: torch.ones(4).pin_memory().to(CARD),
    "counts": lambda x: torch.bincount(x.long(), minlength=4),
    "places": lambda x: x.nonzero(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_is_seen(wait: Callable[[Tensor], object]) -> None:
    with fake_card():
        x = torch.zeros(4, device=CARD)
        with without_waits(), pytest.raises(HostSync):
            wait(x)


def test_work_that_does_not_wait_is_let_through() -> None:
    with fake_card():
        x = torch.zeros(4, 6, device=CARD)
        with without_waits():
            uploaded = torch.ones(4, dtype=torch.int64).pin_memory().to(CARD, non_blocking=True)
            assert x[uploaded, :3].shape == (4, 3)
            assert x[..., None, 2:].shape == (4, 1, 4)
            assert x[1, uploaded].shape == (4,)
            x[uploaded] = 3.0
            assert x.masked_fill(x > 0, 1.0).is_cuda
            assert x.repeat_interleave(uploaded, 0, output_size=9).shape == (9, 6)


def test_tensors_of_two_devices_do_not_mix() -> None:
    with fake_card(), pytest.raises(Exception, match="same device"):
        torch.zeros(4, device=CARD) + torch.zeros(4)
