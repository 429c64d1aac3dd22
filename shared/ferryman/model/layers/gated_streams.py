"""Residual streams that products mix for a part of a layer (Qwen 4): [tokens, streams, hidden_dim].

n       = norm(stream) of each stream, by weights of its own
low, g  = n · Wdown, n · Wwrite                 n is all streams side by side; both over their count
x       = Σ_s sigmoid(silu(low) · Wup)_s · n_s / streams             y = part(x), without a norm
stream_s ← stream_s + 2 · sigmoid(g_s) · y

All streams begin as the embedding. The final norm is such an x, with nothing to write.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ferryman.model.layers.decoder_layers import LayerPlace, Residual
from ferryman.model.layers.hyper_connections import StreamResidual
from ferryman.model.weights.linear import Linear
from ferryman.model.weights.matrix import join_linear
from ferryman.model.weights.named_weights import Weights, accumulation_dtype
from ferryman_kernels.elementwise.activations import sigmoid, silu
from ferryman_kernels.elementwise.rms_norm import grouped_rms_norm
from ferryman_kernels.elementwise.streams.stream_mean import gated_stream_mean


@dataclass(frozen=True, slots=True)
class GatedStreamsShape:
    """`count` streams, whose gates are made from `rank` numbers."""

    count: int
    rank: int


@dataclass(frozen=True, slots=True)
class StreamMixer:
    """Reads one row of all streams. `norm_weight` [streams · hidden_dim] is in the accumulation
    dtype; `down` yields the `rank` numbers, then a gate for each stream that is written."""

    norm_weight: Tensor
    norm_eps: float
    rank: int
    down: Linear
    up: Linear

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The row [tokens, hidden_dim], and the gates [tokens, streams] before their sigmoid."""
        flat, count = streams.flatten(1), streams.shape[1]
        normed = grouped_rms_norm(flat, self.norm_weight, self.norm_eps, count)
        low, written = self.down(normed).tensor_split((self.rank,), dim=1)
        gates = self.up(silu(low)).view_as(streams)
        return gated_stream_mean(normed.view_as(streams), gates), written


@dataclass(frozen=True, slots=True)
class MixedStreamsPath:
    """The path around a part that reads what `mixer` makes of all streams."""

    mixer: StreamMixer

    def entered(self, hidden: Tensor) -> tuple[Tensor, Residual]:
        x, written = self.mixer.read(hidden)
        gates = sigmoid(written.to(accumulation_dtype(hidden.dtype))).mul_(2.0)
        return x, StreamResidual(hidden, gates)


@dataclass(frozen=True, slots=True)
class MixedStreamsNorm:
    """The final norm: the row that its mixer reads of the streams."""

    mixer: StreamMixer

    def __call__(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden_dim] for `hidden` [tokens, streams, hidden_dim]."""
        return self.mixer.read(hidden)[0]


def load_stream_mixer(
    weights: Weights, shape: GatedStreamsShape, place: LayerPlace, *, writes: bool = True
) -> StreamMixer:
    """The mixer under `weights`; without `writes` it has no gates for writing. Every rank computes
    all of it."""
    wide = shape.count * place.hidden_dim
    names = {"input_mix_weight_down.weight": shape.rank}
    if writes:
        names["block_inject_weight.weight"] = shape.count
    scaled = weights.scaled(dict.fromkeys(names, 1 / shape.count))
    norm_weight = weights.precise("hc_norm.weight", wide) + place.norm_origin
    return StreamMixer(
        norm_weight=norm_weight,
        norm_eps=place.norm_eps,
        rank=shape.rank,
        down=join_linear([scaled.matrix(name, rows, wide) for name, rows in names.items()]),
        up=weights.matrix("input_mix_weight_up.weight", wide, shape.rank).linear(None),
    )
