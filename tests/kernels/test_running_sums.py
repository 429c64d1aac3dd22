"""Running sums on a card: a row's bits are its own, and they are the row's sums."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.one_kernel import noted_kernels

from ferryman_kernels.elementwise import running_sums
from ferryman_kernels.elementwise.running_sums import running_sums_, running_sums_triton


@pytest.mark.parametrize("length", [1, 300, 5000])
def test_each_row_has_its_own_sums(length: int, device: torch.device) -> None:
    x = torch.rand(5, length, dtype=torch.float64).to(device)
    right = torch.cumsum(x.cpu(), dim=1)
    with noted_kernels() as compiled:
        found = running_sums_triton(x.clone())
        alone = torch.cat([running_sums_triton(row[None].clone()) for row in x])
    assert torch.equal(found, alone)
    assert len(compiled) == 1
    torch.testing.assert_close(found.cpu(), right, rtol=1e-14, atol=0)
    own = running_sums_(x.cpu())
    assert own.data_ptr() != found.data_ptr()
    torch.testing.assert_close(own, right, rtol=0, atol=0)


def test_another_block_is_caught(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 5000, dtype=torch.float64).to(device)
    found = running_sums_triton(x.clone())
    monkeypatch.setattr(running_sums, "BLOCK", 64)
    assert not torch.equal(running_sums_triton(x.clone()), found)
