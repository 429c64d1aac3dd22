"""Readers of config fields into the shapes of a TransformerConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ferryman.model.readers.config_readers import (
    head_dim_of,
    read_attention,
    read_layers,
    read_rotary,
)
from ferryman.model.shapes.attention_shapes import AttentionShape
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.feed_forward_shapes import MlpShape, MoeShape

WINDOW, FULL = "sliding_attention", "full_attention"


def read_rotary_attention(
    fields: ConfigFields, default_factor: float = 1.0, *, is_interleaved: bool = False
) -> AttentionShape:
    """Full attention with rotary positions, scores scaled by 1 / √head_dim.

    `default_factor` is the part of a head that turns unless the config says so; rotations that are
    interleaved join neighbouring channels.
    """
    positions = replace(read_rotary(fields, default_factor), is_interleaved=is_interleaved)
    return read_attention(fields, head_dim_of(fields) ** -0.5, positions)


def with_rope_of(fields: ConfigFields, word: str) -> ConfigFields:
    """The fields with the rope parameters of layers of the type `word` alone, if the config has
    some for each type; those beside the types are of all."""
    rope = fields.raw.get("rope_parameters")
    if not isinstance(rope, dict) or word not in rope:
        return fields
    common = {name: value for name, value in rope.items() if not isinstance(value, dict)}
    of_word = ConfigFields(fields.source, rope).inner(word).raw
    return ConfigFields(fields.source, {**fields.raw, "rope_parameters": {**common, **of_word}})


def read_windows(
    fields: ConfigFields, full: AttentionShape, is_window: Callable[[int], bool]
) -> tuple[AttentionShape, ...]:
    """`full`, or the same with a window, for each layer: by "layer_types", or else by `is_window`
    of the layer's index.

    Without window layers "sliding_window" is not read.
    """
    if fields.raw.get("layer_types") is not None:
        are_windows = read_layers(fields, "layer_types", {WINDOW: True, FULL: False})
    else:
        are_windows = tuple(map(is_window, range(fields.whole("num_hidden_layers"))))
    if not any(are_windows):
        return (full,) * len(are_windows)
    window = replace(full, window_len=fields.whole("sliding_window"))
    return tuple(window if windowed else full for windowed in are_windows)


def read_short_windows(fields: ConfigFields, full: AttentionShape) -> tuple[AttentionShape, ...]:
    """`read_windows`, in all layers if "sliding_window" is shorter than the context. A longer one
    hides nothing (Phi 4)."""
    is_short = fields.raw.get("sliding_window") is not None and (
        fields.whole("sliding_window") < fields.whole("max_position_embeddings")
    )
    return read_windows(fields, full, lambda _: is_short)


def read_experts(
    fields: ConfigFields, *, count: str = "num_experts", inner_dim: str = "moe_intermediate_size"
) -> MoeShape:
    """Routed experts; `count` and `inner_dim` are the names of fields in this config."""
    num_experts, chosen = fields.whole(count), fields.whole("num_experts_per_tok")
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most {count} {num_experts}")
    return MoeShape(num_experts, chosen, fields.whole(inner_dim))


def read_plain_mlp(fields: ConfigFields) -> MlpShape:
    """A gated MLP without biases, of a family that has no field for them."""
    return MlpShape(fields.whole("intermediate_size"), has_bias=False)


def read_sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with experts: every `decoder_sparse_step`-th that "mlp_only_layers" does not
    name (Qwen)."""
    step, dense = fields.whole("decoder_sparse_step", 1), fields.whole_list("mlp_only_layers")
    return tuple(
        layer not in dense and (layer + 1) % step == 0
        for layer in range(fields.whole("num_hidden_layers"))
    )


def read_mlp_types(fields: ConfigFields, num_dense: int) -> tuple[bool, ...]:
    """True for layers with experts: by "mlp_layer_types", or else all but the first `num_dense`."""
    if fields.raw.get("mlp_layer_types") is not None:
        return read_layers(fields, "mlp_layer_types", {"sparse": True, "dense": False})
    return tuple(layer >= num_dense for layer in range(fields.whole("num_hidden_layers")))


def read_turning_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """True for layers with rotary positions; there "no_rope_layers" has 1, in spite of its name
    (SmolLM 3, Llama 4)."""
    num_layers = fields.whole("num_hidden_layers")
    if not fields.raw.get("no_rope_layers"):
        interval = fields.whole("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    flags = fields.whole_list("no_rope_layers")
    if len(flags) < num_layers or set(flags) - {0, 1}:
        raise fields.refusal("no_rope_layers", f"a list of {num_layers} of 0 and 1")
    return tuple(map(bool, flags[:num_layers]))
