"""Arguments of the int8 products over panels and over quads, a check that both pass, and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tests.kernels.tile_processor import lent, on_tiles
from torch import Tensor

from ferryman_kernels.cpu._tiles import has_tiles
from ferryman_kernels.products import _int8_ends, _int8_panels_compiled, int8_product

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of x, codes and scales."""


def drawn_beside_nan(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """x, codes, scales; x is a part of something wider, which is not a number elsewhere."""
    generator = torch.Generator().manual_seed(tokens * shape[0])
    wide = torch.full((tokens, 3 * shape[1]), torch.nan, dtype=dtype)
    x = wide[:, shape[1] : 2 * shape[1]]
    x.copy_(torch.randn(tokens, shape[1], generator=generator))
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return x, codes, (torch.rand(shape[0], generator=generator) + 0.1).to(dtype)


def check_that_infinity_stays_in_its_token(product: Product, others: int, in_dim: int) -> None:
    """The first two outputs see the same infinity with a code of 0 and of -3; a token alone too."""
    x = torch.ones(others + 2, in_dim, dtype=torch.bfloat16)
    x[0, 5], x[1, 6] = torch.inf, torch.nan
    codes = torch.ones(3, in_dim, dtype=torch.int8)
    codes[0, 5], codes[1, 5] = 0, -3
    ones = torch.ones(3, dtype=torch.bfloat16)
    found = product(x, codes, ones)
    alone = torch.cat([product(token[None], codes, ones) for token in x])
    assert torch.equal(found.nan_to_num(3.0), alone.nan_to_num(3.0))
    assert found[0, 0].isnan()
    assert found[0, 1:].tolist() == [-torch.inf, torch.inf]
    assert found[1].isnan().all()
    expected = [in_dim - 1.0, in_dim - 4.0, float(in_dim)]
    assert (found[2:] == torch.tensor(expected)).all()


@contextmanager
def on_numpy_tiles() -> Iterator[None]:
    """The product over panels runs, launcher and loop, as on a processor that has tiles. Other
    products of int8 must not: what they have not compiled yet they share with it."""
    modules = _int8_panels_compiled, _int8_ends
    with on_tiles(*modules) as processor, lent(processor), pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_product, "has_tiles", lambda: True)
        yield


@contextmanager
def by_tiles() -> Iterator[None]:
    """The product over panels runs on the processor's tiles, or else on numpy's."""
    with nullcontext() if has_tiles() else on_numpy_tiles():
        yield
