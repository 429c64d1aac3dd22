"""The mixer of a layer, by its shape: for families whose layers differ in the mixer only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ferryman.model.layers.attention import load_attention
from ferryman.model.layers.decoder_layers import LayerPlace, Mixer
from ferryman.model.layers.delta import load_delta
from ferryman.model.layers.mamba import load_mamba
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.batch import StepBatch
from ferryman.model.shapes.delta_shapes import DeltaShape
from ferryman.model.shapes.recurrent_shapes import MambaShape
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.named_weights import Weights

MixerShape = AttentionShape | MambaShape | DeltaShape


@dataclass(frozen=True, slots=True)
class Parallel:
    """Mixers that read the same hidden states; their outputs are added."""

    mixers: tuple[Mixer, ...]

    def forward(self, hidden: Tensor, batch: StepBatch, state: ModelState) -> Tensor:
        return reduce(torch.add, (mixer.forward(hidden, batch, state) for mixer in self.mixers))


def load_mixer(weights: Weights, shape: MixerShape, place: LayerPlace) -> Mixer:
    """Attention under "self_attn", Mamba-2 under "mamba", a delta net under "linear_attn"."""
    if isinstance(shape, AttentionShape):
        return load_attention(weights.under("self_attn"), shape, place)
    if isinstance(shape, DeltaShape):
        return load_delta(weights.under("linear_attn"), shape, place)
    return load_mamba(weights.under("mamba"), shape, place)
