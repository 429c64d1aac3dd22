"""An MLP without a gate: down(act(up(x)))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ferryman.model.shapes.feed_forward_shapes import MlpShape
from ferryman.model.shapes.ranks import slice_of
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import summed_linear
from ferryman.model.weights.named_weights import Weights

UP_DOWN = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class UngatedMlp:
    """Hidden [tokens, hidden_dim] in and out; `act` sees [tokens, inner_dim] of a rank."""

    up: Linear
    down: Linear
    act: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.act(self.up(hidden)))


def load_ungated_mlp(
    weights: Weights,
    shape: MlpShape,
    hidden_dim: int,
    act: Callable[[Tensor], Tensor],
    names: tuple[str, str] = UP_DOWN,
) -> UngatedMlp:
    """The MLP under `weights`, whose products have `names`. A rank has a part of inner_dim."""
    group, (up_name, down_name) = weights.group, names
    up = weights.matrix(f"{up_name}.weight", shape.inner_dim, hidden_dim)
    down = weights.matrix(f"{down_name}.weight", hidden_dim, shape.inner_dim)
    bias, down_bias = None, None
    if shape.has_bias:
        rank_slice = partial(slice_of, group=group)
        bias = weights.tensor(f"{up_name}.bias", shape.inner_dim, part=rank_slice)
        down_bias = weights.tensor(f"{down_name}.bias", hidden_dim)
    return UngatedMlp(
        slice_of(up, group).linear(bias),
        summed_linear(slice_of(down, group, axis=1), down_bias, group),
        act,
    )
