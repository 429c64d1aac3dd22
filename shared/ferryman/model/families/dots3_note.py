"""dots3 note's text: gated latent attention, in windows or at places that an indexer chooses.

Layers with windows have sizes of their own. Normed latents are multiplied by √(hidden_dim / rank)
unless a config says otherwise, and the rotating key has a norm. Experts are those of DeepSeek-V3.
The layer for multi-token prediction is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ferryman.cache.manifest import StateManifest
from ferryman.model.families.deepseek import read_latent, with_whole_turns
from ferryman.model.layers.decoder import Decoder, EndScales, load_model_decoder
from ferryman.model.layers.decoder_layers import (
    DecoderLayer,
    FeedForward,
    LayerPlace,
    Mixer,
    load_decoder_layer,
)
from ferryman.model.layers.latent import load_latent_attention
from ferryman.model.layers.mlp import load_gated_mlp
from ferryman.model.layers.moe import load_routed
from ferryman.model.layers.sparse_latent import load_indexer, load_placed_attention
from ferryman.model.readers.config_readers import (
    check_activation,
    check_flags,
    check_values,
    read_grouped_routing,
    read_layers,
    read_rotary,
    read_trunk,
)
from ferryman.model.readers.transformer_readers import (
    FULL,
    WINDOW,
    read_experts,
    read_mlp_types,
    read_plain_mlp,
    with_rope_of,
)
from ferryman.model.shapes.attention_shapes import (
    GateActivation,
    GateShape,
    IndexShape,
    LatentShape,
)
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import (
    FeedForwardShape,
    MixtureShape,
    MlpShape,
)
from ferryman.model.shapes.model_shapes import StateShape, TrunkShape
from ferryman.model.weights.named_weights import Weights
from ferryman.model.weights.text_model import text_fields, text_weights

INDEXED = "indexed_attention"
NUM_DENSE = 1
GATE = GateShape("g_proj", GateActivation.SIGMOID, is_by_head=True)
DEFAULTS = {
    "num_attention_heads": 128,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 80_000_000.0,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "shared_experts_intermediate_size": 1536,
    "routed_scaling_factor": 1.0,
    "sliding_window": 512,
}
"""The meaning of fields that a config leaves out."""

WINDOW_SIZES: Mapping[str, int] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""The sizes of layers with windows, where a published config leaves out "swa_…"."""

_FORMER = {
    "sliding_window": "sliding_window_size",
    "shared_experts_intermediate_size": "moe_shared_expert_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class Dots3NoteConfig:
    """`has_index` is True for layers with an indexer."""

    trunk: TrunkShape
    attention: tuple[LatentShape, ...]
    index: IndexShape
    has_index: tuple[bool, ...]
    feed_forwards: tuple[FeedForwardShape, ...]

    @property
    def states(self) -> tuple[tuple[StateShape, ...], ...]:
        layers = zip(self.attention, self.has_index, strict=True)
        return tuple((latent, self.index) if has else (latent,) for latent, has in layers)


def read_dots3_note(whole: ConfigFields) -> Dots3NoteConfig:
    """dots3 note's text: gated latents, in windows or at places that an indexer chooses; experts"""
    fields = text_fields(whole).with_former(**_FORMER).with_defaults(**DEFAULTS)
    _refuse_other_layers(fields)
    words = _layer_types(fields)
    trunk, experts = read_trunk(fields), read_experts(fields, count="n_routed_experts")
    inner_dim = fields.whole("shared_experts_intermediate_size")
    shared = MlpShape(inner_dim * fields.whole("n_shared_experts", 1), has_bias=False)
    mixture = MixtureShape(experts, read_grouped_routing(fields, experts), shared)
    dense = read_plain_mlp(fields)
    attention = tuple(_latent(fields, words, layer) for layer in range(trunk.num_layers))
    return Dots3NoteConfig(
        trunk=trunk,
        attention=attention,
        index=_index(fields, attention, words),
        has_index=tuple(word == INDEXED for word in words),
        feed_forwards=tuple(mixture if has else dense for has in _sparse_layers(fields)),
    )


def _refuse_other_layers(fields: ConfigFields) -> None:
    check_activation(fields)
    check_flags(
        fields,
        qk_layernorm=True,
        k_rope_only_layernorm=True,
        rope_interleave=True,
        mlp_bias=False,
    )
    expected = {"attention_gate_type": "headwise", "swa_attention_gate_type": "headwise"}
    check_values(fields, expected)
    if fields.raw.get("topk_method", "noaux_tc") not in (None, "noaux_tc"):
        raise fields.refusal("topk_method", "'noaux_tc'")
    if fields.raw.get("scoring_func", "noaux_tc") not in ("noaux_tc", "sigmoid"):
        raise fields.refusal("scoring_func", "'noaux_tc'")


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Each layer's word. In published configs full attention has indexers unless "use_dsa" is
    false; those of transformers say so themselves, and have sizes by layer."""
    is_of_transformers = "per_layer_config" in fields.raw
    has_windows = fields.flag("use_sliding_window", True)
    named = fields.with_defaults(
        layer_types=[
            WINDOW if has_windows and layer >= 2 and layer % 4 != 1 else FULL
            for layer in range(fields.whole("num_hidden_layers"))
        ]
    )
    words = read_layers(named, "layer_types", {word: word for word in (INDEXED, FULL, WINDOW)})
    if is_of_transformers and fields.raw.get("use_dsa") is None:
        return words
    full = INDEXED if fields.flag("use_dsa", True) else FULL
    return tuple(word if word == WINDOW else full for word in words)


def _latent(fields: ConfigFields, words: tuple[str, ...], layer: int) -> LatentShape:
    """Latent attention of one layer, by its sizes and the rope parameters of its type."""
    word, sized = words[layer], _sized(fields, words[layer], layer)
    turning = ConfigFields(sized.source, {**sized.raw, "head_dim": sized.whole("qk_rope_head_dim")})
    positions = read_rotary(with_whole_turns(with_rope_of(turning, word)), default_factor=1.0)
    rank, hidden_dim = sized.whole("q_lora_rank"), fields.whole("hidden_size")
    shape = read_latent(sized, positions, is_interleaved=True)
    rescales = fields.flag("apply_mla_qkv_lora_rescale", True)
    return replace(
        shape,
        gate=GATE,
        window_len=fields.whole("sliding_window") if word == WINDOW else 0,
        norms_rope=True,
        query_scale=(hidden_dim / rank) ** 0.5 if rescales else 1.0,
        latent_scale=(hidden_dim / shape.latent_dim) ** 0.5 if rescales else 1.0,
        norm_eps=fields.positive("rms_norm_eps"),
    )


def _sized(fields: ConfigFields, word: str, layer: int) -> ConfigFields:
    """The fields with those of one layer laid over them."""
    if "per_layer_config" in fields.raw:
        return _over(fields, fields.inner("per_layer_config").inner(str(layer)).raw)
    if word != WINDOW:
        return fields
    sizes = {name: fields.whole(f"swa_{name}", size) for name, size in WINDOW_SIZES.items()}
    rest = sizes["head_dim"] - sizes["qk_nope_head_dim"]
    turning = fields.whole("swa_qk_rope_head_dim", rest)
    theta = fields.positive("swa_rope_theta", 50_000.0)
    return _over(fields, {**sizes, "qk_rope_head_dim": turning, "rope_theta": theta})


def _over(fields: ConfigFields, sizes: Mapping[str, object]) -> ConfigFields:
    return ConfigFields(fields.source, {**fields.raw, **sizes})


def _index(
    fields: ConfigFields, attention: tuple[LatentShape, ...], words: tuple[str, ...]
) -> IndexShape:
    index = IndexShape(
        fields.whole("index_n_heads"),
        fields.whole("index_head_dim"),
        fields.whole("index_topk"),
        is_interleaved=True,
    )
    for shape, word in zip(attention, words, strict=True):
        if word == INDEXED and index.head_dim < shape.rope_dim:
            raise fields.refusal("index_head_dim", f"at least {shape.rope_dim}, which turn")
    return index


def _sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with experts: all but the first, of those that "moe_layer_freq" has, which is
    a period or a list of 0 and 1."""
    num_dense = fields.whole("first_k_dense_replace", NUM_DENSE, least=0)
    after_dense = read_mlp_types(fields, num_dense)
    name, num_layers = "moe_layer_freq", fields.whole("num_hidden_layers")
    freq = fields.raw.get(name, 1)
    if fields.raw.get("mlp_layer_types") is not None or freq == 1:
        return after_dense
    if isinstance(freq, list):
        flags = fields.whole_list(name)
        if len(flags) != num_layers or set(flags) - {0, 1}:
            raise fields.refusal(name, f"a list of {num_layers} of 0 and 1")
    else:
        flags = tuple(int(layer % fields.whole(name) == 0) for layer in range(num_layers))
    return tuple(after and flag == 1 for after, flag in zip(after_dense, flags, strict=True))


def load_dots3_note(config: Dots3NoteConfig, manifest: StateManifest, weights: Weights) -> Decoder:
    """The model, or the text model of a folder whose model also reads images and sound."""
    text = text_weights(weights)
    return load_model_decoder(config, manifest, text, partial(_layer, config), EndScales())


def _layer(config: Dots3NoteConfig, weights: Weights, place: LayerPlace) -> DecoderLayer:
    mixer = _mixer(config, weights.under("self_attn"), place)
    return load_decoder_layer(weights, place, mixer, _feed_forward(config, weights, place))


def _mixer(config: Dots3NoteConfig, weights: Weights, place: LayerPlace) -> Mixer:
    shape = config.attention[place.layer]
    if not config.has_index[place.layer]:
        return load_latent_attention(weights, shape, place)
    attention = load_placed_attention(weights, shape, place)
    return load_indexer(weights.under("indexer"), attention, shape, config.index, place)


def _feed_forward(config: Dots3NoteConfig, weights: Weights, place: LayerPlace) -> FeedForward:
    shape, inside = config.feed_forwards[place.layer], weights.under("mlp")
    if isinstance(shape, MlpShape):
        return load_gated_mlp(inside, shape, place.hidden_dim)
    return load_routed(inside, shape, place.hidden_dim)
