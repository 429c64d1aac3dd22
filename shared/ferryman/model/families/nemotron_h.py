"""Nemotron-H: layers of one part each, Mamba-2, attention without positions or MLP, by a pattern.

hidden += part(norm(hidden))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ferryman.cache.manifest import StateManifest
from ferryman.model.attention import load_attention
from ferryman.model.decoder import Decoder, EndScales, load_ends
from ferryman.model.family import Family
from ferryman.model.fields import Fields
from ferryman.model.layers import FeedForwardLayer, Layer, MixerLayer, Place, load_norm
from ferryman.model.linear import Linear, make_linear
from ferryman.model.mamba import load_mamba
from ferryman.model.reading import read_attention, read_trunk
from ferryman.model.shapes import (
    AttentionShape,
    MambaShape,
    MlpShape,
    NoPositions,
    TrunkShape,
)
from ferryman.model.weights import Weights

Part = AttentionShape | MambaShape | MlpShape

# The letters of `hybrid_override_pattern`, as published, and the words that came later.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """One part for each layer."""

    trunk: TrunkShape
    parts: tuple[Part, ...]

    @property
    def states(self) -> tuple[tuple[AttentionShape | MambaShape, ...], ...]:
        return tuple(() if isinstance(part, MlpShape) else (part,) for part in self.parts)


def _read(fields: Fields) -> NemotronHConfig:
    _refuse_what_is_not_supported(fields)
    mlp = MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False))
    scale = fields.whole("head_dim") ** -0.5
    attention, mamba = read_attention(fields, scale, NoPositions()), _mamba(fields)
    meanings: Mapping[str, Part] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
        "mlp": mlp,
    }
    name, words = _pattern(fields)
    if any(word not in meanings for word in words):
        raise fields.refusal(name, f"made of {', '.join(meanings)}")
    parts = tuple(meanings[word] for word in words)
    trunk = read_trunk(fields, num_layers=len(parts), norm_eps="layer_norm_epsilon")
    return NemotronHConfig(trunk, parts)


def _pattern(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """Which field says what each layer is, and what it says."""
    if isinstance(letters := fields.raw.get("hybrid_override_pattern"), str):
        return "hybrid_override_pattern", tuple(_LETTERS.get(each, each) for each in letters)
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    return name, fields.words(name)


def _refuse_what_is_not_supported(fields: Fields) -> None:
    expected: Mapping[str, tuple[object, ...]] = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "residual_in_fp32": (False,),
    }
    for name, values in expected.items():
        if fields.raw.get(name, values[0]) not in values:
            raise fields.refusal(name, f"{values[0]!r}; nothing else is supported")


def _mamba(fields: Fields) -> MambaShape:
    heads, groups = fields.whole("mamba_num_heads"), fields.whole("n_groups")
    if heads % groups:
        raise fields.refusal("n_groups", f"a divisor of mamba_num_heads {heads}")
    has_bias = fields.flag("use_bias", False)
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=fields.whole("mamba_head_dim"),
        ssm_groups=groups,
        ssm_state=fields.whole("ssm_state_size"),
        conv_width=fields.whole("conv_kernel", least=2),
        has_conv_bias=fields.flag("use_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
        dt_limit=(fields.real("time_step_min", 0.001), float("inf")),
    )


@dataclass(frozen=True, slots=True)
class SquaredReluMlp:
    """down(relu(up)²): no gate."""

    up: Linear
    down: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(F.relu(self.up(hidden)).square())


def _load(config: NemotronHConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    root = "backbone" if "backbone.embeddings.weight" in weights.checkpoint.tensors else "model"
    return Decoder(
        config=config,
        manifest=manifest,
        ends=load_ends(
            weights,
            config.trunk,
            f"{root}.norm_f.weight",
            EndScales(),
            embedded=f"{root}.embeddings.weight",
        ),
        layers=tuple(
            _layer(config, manifest.scan_chunk, weights.under(f"{root}.layers.{index}"), index)
            for index in range(config.trunk.num_layers)
        ),
    )


def _layer(config: NemotronHConfig, scan_chunk: int, weights: Weights, index: int) -> Layer:
    dim, eps = config.trunk.hidden_dim, config.trunk.norm_eps
    norm, inside = load_norm(weights, "norm", dim, eps), weights.under("mixer")
    place = Place(index, dim, eps, scan_chunk)
    match config.parts[index]:
        case AttentionShape() as attention:
            return MixerLayer(norm, load_attention(inside, attention, place))
        case MambaShape() as mamba:
            return MixerLayer(norm, load_mamba(inside, mamba, place))
        case MlpShape() as mlp:
            return FeedForwardLayer(norm, _load_mlp(inside, mlp, dim))


def _load_mlp(weights: Weights, shape: MlpShape, hidden_dim: int) -> SquaredReluMlp:
    up = weights.tensor("up_proj.weight", shape.inner_dim, hidden_dim)
    down = weights.tensor("down_proj.weight", hidden_dim, shape.inner_dim)
    if not shape.has_bias:
        return SquaredReluMlp(make_linear(up), make_linear(down))
    return SquaredReluMlp(
        make_linear(up, weights.tensor("up_proj.bias", shape.inner_dim)),
        make_linear(down, weights.tensor("down_proj.bias", hidden_dim)),
    )


FAMILY = Family(("NemotronHForCausalLM",), _read, _load)
