"""Layers that are made of torch's operations give a row the same bits in every batch: routers,
gates, experts, streams. Products are left out: a score is one of the row's own numbers.

Some scores are rounded, so that experts tie: a choice among equals has to be the row's own, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.row_bits import PLACES, Rows, check_rows, drawn
from torch import Tensor

from ferryman.model.families.gemma3n import SparseGelu
from ferryman.model.families.lfm import BiasedRouting, biased_router
from ferryman.model.families.transformer_variants import Xielu
from ferryman.model.layers.centred_norm import CentredHeads, LayerNorm
from ferryman.model.layers.decoder_layers import RmsNorm
from ferryman.model.layers.expert_router import (
    ExpertRouter,
    OneByOneRouter,
    grouped_router,
    scaled_shares_of_chosen,
    shares_by_biased_rank,
    shares_of_all,
    shares_of_best_groups,
    shares_of_chosen,
    sigmoid_of_chosen,
)
from ferryman.model.layers.experts import SeparateExperts, ShareOfInput, ShareOfOutput
from ferryman.model.layers.gating import gate_alone
from ferryman.model.layers.hidden_streams import AlternatingUpdates, StreamsShape, as_long_as
from ferryman.model.layers.moe import ExpertsBesideGated, NormedRouter
from ferryman.model.layers.rotation import GrownQueries, without_rotary
from ferryman.model.shapes.attention_shapes import QueryGrowth
from ferryman.model.shapes.feed_forward_shapes import (
    BiasedSoftmaxRouting,
    GroupedRouting,
    SigmoidRouting,
    SoftmaxRouting,
)

EXPERTS, STREAMS, HIDDEN = 20, 4, 24
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def scores(x: Tensor) -> Tensor:
    """A router's scores: every second one is rounded, so that some are equal."""
    own = x[:, :EXPERTS] / 2
    own[:, ::2] = own[:, ::2].round()
    return own


def bias() -> Tensor:
    return torch.linspace(-0.25, 0.25, EXPERTS).round(decimals=1)


ROUTERS: dict[str, ExpertRouter] = {
    "shares_of_chosen": shares_of_chosen(scores, 4),
    "shares_of_all": shares_of_all(scores, 4, 2.5),
    "sigmoid_of_chosen": sigmoid_of_chosen(scores, 2, SigmoidRouting()),
    "shares_of_best_groups": shares_of_best_groups(scores, 3, SoftmaxRouting(False, 1.0, 4, 2)),
    "shares_by_biased_rank": shares_by_biased_rank(scores, bias(), 5, BiasedSoftmaxRouting(1e-12)),
    "OneByOneRouter": OneByOneRouter(scores, 0.01),
    "grouped_router": grouped_router(scores, bias(), GroupedRouting(4, 2, True, 2.5), 6),
    "biased_router": biased_router(
        scores, bias(), BiasedRouting(has_bias=True, norms_shares=True, scaling=1.5), 4
    ),
    "NormedRouter": NormedRouter(
        lambda x: x, scaled_shares_of_chosen(scores, 4, torch.linspace(0.5, 2, EXPERTS))
    ),
}


def routed(router: ExpertRouter) -> Rows:
    def run(x: Tensor) -> Tensor:
        shares, chosen = router(x)
        return torch.cat((shares.double(), chosen.double()), dim=1)

    return run


def _separate(weighing: ShareOfInput | ShareOfOutput) -> Rows:
    experts = tuple((lambda x, k=k: x * (0.3 + k)) for k in range(EXPERTS))
    choose = shares_of_chosen(scores, 4)

    def run(x: Tensor) -> Tensor:
        shares, chosen = choose(x)
        return SeparateExperts(experts, weighing)(x, shares.to(x.dtype), chosen)

    return run


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _updates(x: Tensor) -> AlternatingUpdates:
    shape = StreamsShape(STREAMS, 1, True)
    norm = RmsNorm(torch.ones(HIDDEN, dtype=_wide(x)), 1e-6)
    return AlternatingUpdates(
        shape,
        norm,
        route=lambda x: x[:, :STREAMS].contiguous(),
        predictions=lambda modes: modes.repeat(1, STREAMS),
        corrections=lambda modes: modes,
    )


def _streams(x: Tensor) -> Tensor:
    """All streams of each row [tokens, streams, hidden_dim]."""
    row = x[:, :HIDDEN]
    return torch.stack((row, row * 0.3, 1 - row, row.flip(1)), dim=1)


def _corrected(x: Tensor) -> Tensor:
    updates, streams = _updates(x), _streams(x)
    return updates.corrected(streams, streams[:, 2].contiguous()).flatten(1)


def _grown(x: Tensor) -> Tensor:
    positions = x[:, 0].double().abs().mul(1000).long()
    turn = GrownQueries(without_rotary, QueryGrowth(beta=0.1, length=64, first=1))
    return turn(x[:, None], x[:, None], positions)[0].flatten(1)


LAYERS: dict[str, Rows] = {
    "separate experts": _separate(ShareOfOutput()),
    "separate experts, shares of inputs": _separate(ShareOfInput()),
    "ExpertsBesideGated": lambda x: ExpertsBesideGated(
        lambda x: x * 0.5, lambda x: x * 1.5, lambda x: x[:, :1].contiguous()
    )(x),
    "gate_alone": lambda x: gate_alone(x, x.roll(1, dims=1)),
    "SparseGelu": SparseGelu(0.7),
    "Xielu": lambda x: Xielu(*x.new_tensor((0.8, 0.7, 0.5, -1e-6)))(x),
    "LayerNorm": lambda x: LayerNorm(
        torch.ones(x.shape[1], dtype=_wide(x)), torch.ones(x.shape[1], dtype=_wide(x)), 1e-6
    )(x),
    "CentredHeads": lambda x: CentredHeads(torch.ones(2, HIDDEN // 2, dtype=_wide(x)), 1e-6)(
        x[:, :HIDDEN].reshape(len(x), 2, -1)
    ).flatten(1),
    "as_long_as": lambda x: as_long_as(x, x.roll(1, dims=1) * 3),
    "predicted streams": lambda x: _updates(x).predicted(_streams(x)).flatten(1),
    "corrected streams": _corrected,
    "GrownQueries": _grown,
}


@pytest.mark.parametrize("name", sorted(ROUTERS))
@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES[:2]),
    place=PLACES,
    threads=st.integers(1, 3),
)
def test_a_router_gives_a_row_the_same_experts_and_shares_in_every_batch(
    name: str, dtype: torch.dtype, place: tuple[int, tuple[int, int]], threads: int
) -> None:
    tokens, part = place
    check_rows(routed(ROUTERS[name]), drawn(tokens, EXPERTS, dtype), slice(*part), threads)


@pytest.mark.parametrize("name", sorted(LAYERS))
@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    place=PLACES,
    threads=st.integers(1, 3),
)
def test_a_layer_gives_a_row_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype, place: tuple[int, tuple[int, int]], threads: int
) -> None:
    tokens, part = place
    check_rows(LAYERS[name], drawn(tokens, 2 * HIDDEN + 1, dtype), slice(*part), threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sparse_gelu_is_its_formula(dtype: torch.dtype) -> None:
    gate = drawn(20, 64, dtype)
    wide = gate.double()
    cutoff = wide.mean(-1, keepdim=True) + 0.7 * wide.std(-1, keepdim=True, unbiased=False)
    expected = torch.nn.functional.gelu((wide - cutoff).relu(), approximate="tanh")
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert (SparseGelu(0.7)(gate).double() - expected).abs().max() < tolerance


def test_predicted_streams_are_the_product_of_matrices() -> None:
    x = drawn(9, HIDDEN, torch.float64)
    updates, streams = _updates(x), _streams(x)
    found: Callable[[Tensor], Tensor] = updates.predicted
    modes = RmsNorm(torch.ones(HIDDEN, dtype=torch.float64), 1e-6)(streams[:, 1].contiguous())
    mixing = modes[:, :STREAMS].tanh().repeat(1, STREAMS).view(-1, STREAMS, STREAMS)
    torch.testing.assert_close(found(streams), streams + mixing @ streams, rtol=0, atol=1e-12)
