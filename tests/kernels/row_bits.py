"""Rows of an operation alone, among others, and as a part of something wider: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

Rows = Callable[[Tensor], Tensor]
"""From rows [tokens, dim] to rows [tokens, …]."""


@contextmanager
def threads_of_torch(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_rows(run: Rows, x: Tensor, part: slice, threads: int) -> None:
    """`run` gives each row of x alone what it gives it among all and in the part."""
    alone = torch.cat([run(row[None]) for row in x])
    with threads_of_torch(threads):
        assert torch.equal(run(x), alone)
        wider = torch.cat((x[part], x[part]), dim=1)
        assert torch.equal(run(wider[:, x.shape[1] :]), alone[part])


def drawn(tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(tokens * 1000 + dim)
    return (4 * torch.randn(tokens, dim, generator=generator)).to(dtype)


PLACES = st.integers(1, 300).flatmap(
    lambda tokens: st.tuples(
        st.just(tokens),
        st.integers(0, tokens - 1).flatmap(
            lambda first: st.tuples(st.just(first), st.integers(first + 1, tokens))
        ),
    )
)
"""The number of rows, and the first and the end of a part of them."""
