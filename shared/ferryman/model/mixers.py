"""The mixer of a layer, by its shape: for families whose layers differ in nothing else."""

from __future__ import annotations

from ferryman.model.attention import load_attention
from ferryman.model.layers import Mixing, Place
from ferryman.model.mamba import load_mamba
from ferryman.model.shapes import AttentionShape, MambaShape
from ferryman.model.weights import Weights

MixerShape = AttentionShape | MambaShape


def load_mixer(weights: Weights, shape: MixerShape, place: Place) -> Mixing:
    """Attention under "self_attn", Mamba-2 under "mamba"."""
    if isinstance(shape, AttentionShape):
        return load_attention(weights.under("self_attn"), shape, place)
    return load_mamba(weights.under("mamba"), shape, place)
