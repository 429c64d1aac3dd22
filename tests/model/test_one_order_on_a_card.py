"""Under bits on a card, no family asks a library for a sum whose order may follow the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fake_card import CARD, fake_card
from tests.model.comparison import FAMILIES, random_config, swept
from tests.model.test_no_host_sync import (
    REQUESTS,
    decode,
    noted_kernels,
    prefill,
)
from tests.tiny_models import cleared_state, save_random
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.model.layers.decoder_layers import RmsNorm
from ferryman.model.layers.latent import QueryLatent
from ferryman.model.load_options import LoadOptions
from ferryman.model.one_order import OneOrderLinear, in_one_order
from ferryman.model.registry import load_model
from ferryman.model.weights.linear import PlainLinear
from ferryman.sizing.exactness import _FAMILIES_WITH_MEANS
from ferryman_kernels.ragged import on_device

ARITHMETIC = "cuda/9.0-nvidia-h200/bfloat16/r00000000/tp1"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mv", "dot", "einsum")
SUMS = ("sum", "mean", "var", "std", "var_mean", "cumsum", "logsumexp", "norm")
"""torch adds up short rows in one way, long ones by as many threads as are left over."""
SHORT = 32
BY_TILES = ("_decode_split_kernel", "_prefill_kernel", "_tokens_see_kernel", "_decode_join_kernel")
"""Kernels whose order follows the rows of a step."""


class FollowsRows(AssertionError):
    """A library may choose the order of this sum by the number of rows."""


class _RefusedSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0].removeprefix("aten::")
        if name in PRODUCTS or (name in SUMS and _is_long(args)):
            raise FollowsRows(f"{name} of {[tuple(a.shape) for a in args if hasattr(a, 'shape')]}")
        return func(*args, **(kwargs or {}))


def _is_long(args: Sequence[Any]) -> bool:
    x, dims = args[0], args[1] if len(args) > 1 else list(range(args[0].ndim))
    if not x.is_floating_point():
        return False
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(x.shape[dim] > SHORT for dim in dims)


@contextmanager
def _in_one_order_only() -> Iterator[None]:
    with _RefusedSums():  # type: ignore[no-untyped-call]
        yield


@pytest.fixture(autouse=True)
def _fresh_tables() -> Iterator[None]:
    on_device.cache_clear()
    yield
    on_device.cache_clear()


def forwards(folder: Path, arithmetic: str) -> set[str]:
    """The kernels of a prefill and of a decode step of the model in `folder`."""
    with fake_card(), torch.inference_mode():
        options = LoadOptions("bfloat16", CARD, page_size=16, arithmetic=arithmetic)
        model = load_model(folder, options)
        state = cleared_state(model, CARD)
        with noted_kernels() as launched, _in_one_order_only():
            assert prefill(model, state).shape[0] == REQUESTS
            assert decode(model, state).shape[0] == 5
    return launched


@pytest.mark.parametrize("family", swept(FAMILIES))
def test_no_sum_of_a_forward_follows_the_rows(family: str, tmp_path: Path) -> None:
    folder = save_random(tmp_path, random_config(family, 3), 3)
    if family in _FAMILIES_WITH_MEANS:
        with pytest.raises(FollowsRows, match="mean"):
            forwards(folder, ARITHMETIC)
        return
    launched = forwards(folder, ARITHMETIC)
    assert "_dense_kernel" in launched
    assert not launched & set(BY_TILES)


def test_the_fastest_products_are_caught(tmp_path: Path) -> None:
    folder = save_random(tmp_path, random_config("llama", 3), 3)
    with pytest.raises(FollowsRows, match="linear"):
        forwards(folder, "any")


def test_a_long_sum_is_caught() -> None:
    with _in_one_order_only():
        assert torch.ones(3, 8).sum(-1).shape == (3,)
        with pytest.raises(FollowsRows):
            torch.ones(3, 100).mean(-1, keepdim=True)


def test_a_part_that_was_shared_is_shared_again_and_others_stay() -> None:
    shared, norm = PlainLinear(torch.ones(4, 4), None), RmsNorm(torch.ones(4), 1e-5)
    query = QueryLatent(shared, norm)
    tree: Any = query, {"head": shared}, norm
    first, second, kept = in_one_order(tree)
    assert isinstance(first.down, OneOrderLinear)
    assert first.down is second["head"]
    assert first.norm is kept is norm
    assert in_one_order(norm) is norm
