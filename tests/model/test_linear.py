"""The packed linear computes the same as the plain one, and is chosen where it is available."""

from __future__ import annotations

import pytest
import torch

from ferryman.model.weights import linear
from ferryman.model.weights.linear import PackedLinear, PanelLinear, PlainLinear, make_linear, pack
from ferryman_kernels.products.packed_product import reads_panels

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("out_dim", "in_dim"), [(7, 5), (131, 48), (300, 260)])
@pytest.mark.parametrize("tokens", [1, 3, 32, 200])
def test_any_linear_is_the_product_and_the_bias(
    dtype: torch.dtype, has_bias: bool, out_dim: int, in_dim: int, tokens: int
) -> None:
    drawn = torch.Generator().manual_seed(tokens)
    weight = torch.randn(out_dim, in_dim, generator=drawn).to(dtype)
    bias = torch.randn(out_dim, generator=drawn).to(dtype) if has_bias else None
    x = torch.randn(tokens, in_dim, generator=drawn).to(dtype)
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    with torch.inference_mode():
        found = make_linear(weight, bias)(x)
    assert found.dtype is dtype
    assert (found.double() - exact).abs().max() < TOLERANCES[dtype] * exact.abs().max()


@pytest.mark.usefixtures("threads_set_back")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_a_token_has_the_same_bits_with_any_number_of_threads(
    dtype: torch.dtype, tokens: int
) -> None:
    """Two workers of unlike machines hand requests to each other."""
    drawn = torch.Generator().manual_seed(5)
    packed = pack(torch.randn(512, 700, generator=drawn).to(dtype))
    if not isinstance(packed, PanelLinear):
        pytest.skip("this processor has no AVX-512")
    x, found = torch.randn(tokens, 700, generator=drawn).to(dtype), []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        found.append(packed(x))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_linear_reads_its_input_through_strides(dtype: torch.dtype) -> None:
    wide = torch.randn(6, 2 * 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack(torch.eye(32, dtype=dtype))
    for half in wide.chunk(2, dim=-1):
        assert torch.equal(packed(half), half)


@pytest.mark.parametrize(
    ("dtype", "dim", "without"),
    [
        pytest.param(torch.float32, 1024, PackedLinear, id="large float32"),
        pytest.param(torch.float32, 64, PlainLinear, id="float32 that stays in the cache"),
        pytest.param(torch.bfloat16, 64, PackedLinear, id="bfloat16 of any size"),
    ],
)
def test_a_linear_is_in_panels_or_packed_by_onednn_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, without: type
) -> None:
    weight = torch.zeros(dim, dim, dtype=dtype)
    if reads_panels(dtype):
        assert isinstance(make_linear(weight), PanelLinear)
    monkeypatch.setattr(linear, "reads_panels", lambda dtype: False)
    assert isinstance(make_linear(weight), without)


def test_float64_is_torchs() -> None:
    assert isinstance(make_linear(torch.zeros(1024, 1024, dtype=torch.float64)), PlainLinear)
