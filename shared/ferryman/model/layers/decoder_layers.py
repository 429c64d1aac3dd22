"""The layers that every family uses: norm, gated MLP, and the two norms' placement around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.elementwise.rms_norm import add_rms_norm, rms_norm, scaled_sum


class Mixer(Protocol):
    """A layer's operation across positions: attention or a recurrence.

    It takes hidden [tokens, hidden_dim], reads and advances its part of the state, and returns the
    same shape.
    """

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor: ...


class Layer(Protocol):
    """One layer of a decoder with its norms and residual paths; hidden in and out, as in Mixer."""

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor: ...


class Norm(Protocol):
    """A norm of each row of hidden [tokens, dim]."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


class NormLoader(Protocol):
    """Reads the norm called `name` under `weights`."""

    def __call__(self, weights: Weights, name: str, dim: int, eps: float) -> Norm: ...


class FeedForward(Protocol):
    """A layer's operation on each token alone; hidden [tokens, hidden_dim] in and out."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A mixer's place in the decoder, and its settings beyond its own shape.

    `scan_block` is the block of the recurrent scans, in tokens. `norm_origin` is added to a norm's
    stored weight: 1 if checkpoints store its distance from one (Gemma, Qwen3-Next).
    """

    layer: int
    hidden_dim: int
    norm_eps: float
    scan_block: int
    norm_origin: float = 0.0


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root mean square norm with `weight` [hidden_dim], in the accumulation dtype."""

    weight: Tensor
    eps: float

    def __call__(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


def add_and_norm(
    hidden: Tensor, added: Tensor, multiplier: float, norm: Norm
) -> tuple[Tensor, Tensor]:
    """hidden + multiplier · added, all [tokens, dim], and its norm."""
    if isinstance(norm, RmsNorm):
        return add_rms_norm(hidden, added, multiplier, norm.weight, norm.eps)
    total = scaled_sum(hidden, added, multiplier)
    return total, norm(total)


@dataclass(frozen=True, slots=True)
class OpenSum:
    """hidden + multiplier · added, both [tokens, hidden_dim], which is not added yet: the norm that
    reads it adds it in the same kernel."""

    hidden: Tensor
    added: Tensor
    multiplier: float

    def closed(self) -> Tensor:
        return scaled_sum(self.hidden, self.added, self.multiplier)

    def normed(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        return add_and_norm(self.hidden, self.added, self.multiplier, norm)


def load_norm(weights: Weights, name: str, dim: int, eps: float, origin: float = 0.0) -> RmsNorm:
    """The norm called `name`; its weight is stored as the distance from `origin`."""
    return RmsNorm(weights.precise(f"{name}.weight", dim) + origin, eps)


class Residual(Protocol):
    """The hidden states that wait beside a part of a layer for its output."""

    def plus(self, output: Tensor) -> Tensor:
        """The hidden states after the part, whose output is [tokens, hidden_dim]."""
        ...


class ResidualPath(Protocol):
    """The path around a part of a layer, and the norm of what the part reads."""

    def entered(self, hidden: Tensor) -> tuple[Tensor, Residual]:
        """The part's input [tokens, hidden_dim], and what its output is added to."""
        ...


@dataclass(frozen=True, slots=True)
class PlainResidual:
    """Hidden states [tokens, hidden_dim]."""

    hidden: Tensor

    def plus(self, output: Tensor) -> Tensor:
        return self.hidden + output


@dataclass(frozen=True, slots=True)
class NormedPath:
    """hidden + part(norm(hidden))."""

    norm: Norm

    def entered(self, hidden: Tensor) -> tuple[Tensor, Residual]:
        return self.norm(hidden), PlainResidual(hidden)


@dataclass(frozen=True, slots=True)
class PathLayer:
    """A mixer and a feed-forward, each with a path around it."""

    mixer_path: ResidualPath
    mixer: Mixer
    feed_forward_path: ResidualPath
    feed_forward: FeedForward

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        x, residual = self.mixer_path.entered(hidden)
        hidden = residual.plus(self.mixer.forward(x, batch, state))
        x, residual = self.feed_forward_path.entered(hidden)
        return residual.plus(self.feed_forward(x))


@dataclass(frozen=True, slots=True)
class MixerLayer:
    """A mixer alone after a norm, with a residual path (Nemotron-H)."""

    norm: RmsNorm
    mixer: Mixer

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return hidden + self.mixer.forward(self.norm(hidden), batch, state)


@dataclass(frozen=True, slots=True)
class WideMixerLayer:
    """A mixer alone, with a residual path in the accumulation dtype (`residual_in_fp32`).

    `dtype` is the model's: norm and mixer get the hidden state in it.
    """

    norm: RmsNorm
    mixer: Mixer
    dtype: torch.dtype

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed = self.mixer.forward(self.norm(hidden.to(self.dtype)), batch, state)
        return hidden.to(self.norm.weight.dtype) + mixed


@dataclass(frozen=True, slots=True)
class FeedForwardLayer:
    """A feed-forward alone after a norm, with a residual path (Nemotron-H)."""

    norm: RmsNorm
    feed_forward: FeedForward

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return hidden + self.feed_forward(self.norm(hidden))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A mixer and a feed-forward, each after a norm and with a residual path."""

    mixer_norm: Norm
    mixer: Mixer
    feed_forward_norm: Norm
    feed_forward: FeedForward
    residual_multiplier: float = 1.0

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return self.left_open(hidden, batch, state).closed()

    def left_open(self, entering: Tensor | OpenSum, batch: StepBatch, state: ModelState) -> OpenSum:
        """`forward`, with the layer's last sum left to whatever reads it; `entering` may be such a
        sum of the layer before."""
        if isinstance(entering, OpenSum):
            hidden, normed = entering.normed(self.mixer_norm)
        else:
            hidden, normed = entering, self.mixer_norm(entering)
        mixed = self.mixer.forward(normed, batch, state)
        multiplier = self.residual_multiplier
        hidden, normed = add_and_norm(hidden, mixed, multiplier, self.feed_forward_norm)
        return OpenSum(hidden, self.feed_forward(normed), multiplier)


NORMS = ("input_layernorm", "post_attention_layernorm")


def load_decoder_layer(
    weights: Weights,
    place: LayerPlace,
    mixer: Mixer,
    feed_forward: FeedForward,
    *,
    norms: tuple[str, str] = NORMS,
    residual_multiplier: float = 1.0,
) -> DecoderLayer:
    """The layer of two parts that are loaded; `norms` are the names of the norms before them."""
    mixer_norm, feed_forward_norm = (
        load_norm(weights, name, place.hidden_dim, place.norm_eps, place.norm_origin)
        for name in norms
    )
    return DecoderLayer(mixer_norm, mixer, feed_forward_norm, feed_forward, residual_multiplier)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """A mixer and a feed-forward, each before a norm and with a residual path (OLMo 2)."""

    mixer: Mixer
    mixed_norm: Norm
    feed_forward: FeedForward
    fed_norm: Norm

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        hidden = hidden + self.mixed_norm(self.mixer.forward(hidden, batch, state))
        return hidden + self.fed_norm(self.feed_forward(hidden))


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """A mixer and a feed-forward, each between two norms and with a residual path (Gemma)."""

    mixer_norm: Norm
    mixer: Mixer
    mixed_norm: Norm
    feed_forward_norm: Norm
    feed_forward: FeedForward
    fed_norm: Norm

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        mixed = self.mixer.forward(self.mixer_norm(hidden), batch, state)
        hidden = hidden + self.mixed_norm(mixed)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.fed_norm(fed)
