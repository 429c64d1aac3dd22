"""Readers of config fields that several families share, into the shapes that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.shapes.config_fields import TOKEN_IDS, ConfigFields, read_fields
from ferryman.model.shapes.delta_shapes import DeltaLayout, DeltaShape
from ferryman.model.shapes.feed_forward_shapes import (
    BEST_OF_GROUP,
    GroupedRouting,
    MlpShape,
    MoeShape,
)
from ferryman.model.shapes.model_shapes import TrunkShape
from ferryman.model.shapes.recurrent_shapes import Gating, MambaShape
from ferryman.model.shapes.rotary import (
    AlphaScaling,
    LongropeScaling,
    Stretch,
    read_scaling,
    read_theta,
)

Meaning = TypeVar("Meaning")


POSITIONS_OF_A_RECURRENCE = 2**20
"""The context of a model without attention: its state has no last position, but a request has."""


def read_trunk(
    fields: ConfigFields, *, num_layers: int | None = None, norm_eps: str = "rms_norm_eps"
) -> TrunkShape:
    """Sizes and ends of a decoder; `norm_eps` is the field's name in this config."""
    vocab_size = fields.whole("vocab_size")
    return TrunkShape(
        vocab_size=vocab_size,
        hidden_dim=fields.whole("hidden_size"),
        num_layers=num_layers or fields.whole("num_hidden_layers"),
        norm_eps=fields.positive(norm_eps),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.whole("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
    )


SILU = ("silu", "swish")
GELU = "gelu_pytorch_tanh"


def check_activation(
    fields: ConfigFields, name: str = "hidden_act", known_as: Sequence[str] = SILU
) -> None:
    """Refuses an activation of another name. Where there is none, the first of them is meant."""
    expected = known_as[0]
    if fields.raw.get(name, expected) not in known_as:
        raise fields.refusal(name, f"{expected!r}; no other activation is supported")


def check_flags(fields: ConfigFields, **expected: bool) -> None:
    """Refuses a flag of another value. One that is missing has the expected value."""
    for name, value in expected.items():
        if fields.flag(name, value) is not value:
            raise fields.refusal(name, str(value).lower())


def check_values(fields: ConfigFields, expected: Mapping[str, object]) -> None:
    """Refuses a field of another value. One that is missing has the expected value; null is
    another, unless it is expected."""
    for name, value in expected.items():
        if fields.raw.get(name, value) != value:
            raise fields.refusal(name, f"{value!r}; nothing else is supported")


def read_layers(
    fields: ConfigFields, name: str, meanings: Mapping[str, Meaning]
) -> tuple[Meaning, ...]:
    """One meaning for each layer, by the words in the list `name`."""
    words, num_layers = fields.words(name), fields.whole("num_hidden_layers")
    if len(words) != num_layers or any(word not in meanings for word in words):
        raise fields.refusal(name, f"a list of {num_layers} of {', '.join(meanings)}")
    return tuple(meanings[word] for word in words)


def read_used(readers: Sequence[Callable[[], Meaning]]) -> tuple[Meaning, ...]:
    """The meaning of each layer, by its reader.

    A reader that no layer has is not called: published configs keep fields of layers that the model
    does not have, with values that would be refused (granite-4.0-micro).
    """
    read = {reader: reader() for reader in dict.fromkeys(readers)}
    return tuple(read[reader] for reader in readers)


def read_attention(
    fields: ConfigFields, scale: float, positions: RotaryPositions | NoPositions
) -> AttentionShape:
    """Full attention with grouped query heads, by the field names that most families share."""
    q_heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of {q_heads}")
    has_bias = fields.flag("attention_bias", False)
    return AttentionShape(
        q_heads, kv_heads, head_dim_of(fields), scale, has_bias, positions, has_out_bias=has_bias
    )


def head_dim_of(fields: ConfigFields) -> int:
    hidden_dim, q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "head_dim" not in fields.raw and hidden_dim % q_heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size {hidden_dim}")
    return fields.whole("head_dim", hidden_dim // q_heads)


def read_rotary(fields: ConfigFields, default_factor: float) -> RotaryPositions:
    """Rotary positions over a part of each head, scaled as the rope parameters say."""
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.merged_with(name)
    rotary_dim = int(head_dim_of(fields) * rope.positive("partial_rotary_factor", default_factor))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim_of(fields):
        raise rope.refusal("partial_rotary_factor", "such that an even part of a head turns")
    return RotaryPositions(read_theta(rope, 10_000.0), rotary_dim, _scaling(rope, rotary_dim))


def _scaling(rope: ConfigFields, rotary_dim: int) -> Stretch:
    scaling = read_scaling(rope)
    if isinstance(scaling, LongropeScaling) and len(scaling.factors) != rotary_dim // 2:
        raise rope.refusal("long_factor", f"a list of {rotary_dim // 2}, one for each wave")
    if isinstance(scaling, AlphaScaling) and rotary_dim < 4:
        raise rope.refusal("partial_rotary_factor", "such that 4 channels turn")
    return scaling


def read_mlp(fields: ConfigFields) -> MlpShape:
    """A gated MLP, by the field names that most families share."""
    return MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False))


def read_mamba(
    fields: ConfigFields,
    *,
    inner_dim: int | None = None,
    has_out_bias: bool | None = None,
    gating: Gating = Gating.GATE_THEN_NORM,
) -> MambaShape:
    """A Mamba-2 mixer, by the field names of Bamba, Granite and Falcon-H1.

    `inner_dim` defaults to the expanded hidden size. Without `has_out_bias` the out-projection has
    a bias if the in-projection has one.
    """
    heads = fields.whole("mamba_n_heads")
    has_in_bias = fields.flag("mamba_proj_bias", False)
    if inner_dim is None:
        inner_dim = fields.whole("mamba_expand", 2) * fields.whole("hidden_size")
    is_auto = fields.raw.get("mamba_d_head", "auto") == "auto"
    head_dim = inner_dim // heads if is_auto else fields.whole("mamba_d_head")
    if heads * head_dim != inner_dim:
        raise fields.refusal("mamba_n_heads", f"such that heads × head dim = {inner_dim}")
    groups = fields.whole("mamba_n_groups", 1)
    if heads % groups:
        raise fields.refusal("mamba_n_groups", f"a divisor of mamba_n_heads {heads}")
    return MambaShape(
        ssm_heads=heads,
        ssm_head_dim=head_dim,
        ssm_groups=groups,
        ssm_state=fields.whole("mamba_d_state"),
        conv_width=fields.whole("mamba_d_conv", 4, least=2),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        has_in_bias=has_in_bias,
        has_out_bias=has_in_bias if has_out_bias is None else has_out_bias,
        dt_limit=read_dt_limit(fields),
        gating=gating,
    )


def read_grouped_routing(fields: ConfigFields, experts: MoeShape) -> GroupedRouting:
    """The routing of tokens to experts in groups, by the field names of DeepSeek."""
    num_groups = fields.whole("n_group", 1)
    per_group, odd = divmod(experts.num_experts, num_groups)
    if odd or per_group < BEST_OF_GROUP:
        raise fields.refusal(
            "n_group", f"such that {experts.num_experts} experts make groups of 2 or more alike"
        )
    groups_per_token = fields.whole("topk_group", 1)
    if groups_per_token > num_groups:
        raise fields.refusal("topk_group", f"at most n_group {num_groups}")
    if experts.experts_per_token > groups_per_token * per_group:
        raise fields.refusal(
            "num_experts_per_tok", f"at most the {groups_per_token * per_group} of topk_group"
        )
    return GroupedRouting(
        num_groups,
        groups_per_token,
        fields.flag("norm_topk_prob", True),
        fields.positive("routed_scaling_factor", 1.0),
    )


def read_dt_limit(fields: ConfigFields) -> tuple[float, float]:
    """The bounds of a time step."""
    limit = fields.raw.get("time_step_limit")
    if limit is None:
        return (0.0, float("inf"))
    try:
        low, high = (float(bound) for bound in limit)
    except (TypeError, ValueError):
        raise fields.refusal("time_step_limit", "two numbers") from None
    if not (0.0 <= low <= high and low < math.inf and high > 0.0):
        raise fields.refusal(
            "time_step_limit", "two rising numbers from 0, the first of them finite"
        )
    return (low, high)


def read_delta(fields: ConfigFields, layout: DeltaLayout) -> DeltaShape:
    """A gated delta net, by the field names of Qwen3-Next and Qwen3.5."""
    k_heads, v_heads = (
        fields.whole("linear_num_key_heads"),
        fields.whole("linear_num_value_heads"),
    )
    if v_heads % k_heads:
        raise fields.refusal("linear_num_value_heads", f"a multiple of {k_heads} key heads")
    return DeltaShape(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=fields.whole("linear_key_head_dim"),
        v_dim=fields.whole("linear_value_head_dim"),
        conv_width=fields.whole("linear_conv_kernel_dim", 4, least=2),
        layout=layout,
    )


def _eos_token_ids(fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    """Token ids that end a generation: of the generation config, or else of the model config."""
    source = fields
    path = fields.source.with_name("generation_config.json")
    if path.exists():
        generation = read_fields(path)
        source = generation if generation.raw.get("eos_token_id") is not None else fields
    ids = source.whole_list("eos_token_id", TOKEN_IDS)
    if any(token_id >= vocab_size for token_id in ids):
        raise source.refusal("eos_token_id", f"token ids below vocab_size {vocab_size}")
    return ids
