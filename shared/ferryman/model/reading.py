"""What the configs of several families say alike, read into the shapes that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ferryman.model.fields import Fields, read_fields
from ferryman.model.rotary import read_stretch
from ferryman.model.shapes import (
    BEST_OF_GROUP,
    AttentionShape,
    DeltaLayout,
    DeltaShape,
    Gating,
    GroupedRouting,
    MambaShape,
    MlpShape,
    MoeShape,
    NoPositions,
    RotaryPositions,
    TrunkShape,
)

Meaning = TypeVar("Meaning")


def read_trunk(
    fields: Fields, *, num_layers: int | None = None, norm_eps: str = "rms_norm_eps"
) -> TrunkShape:
    """Sizes and ends of a decoder; `norm_eps` is how the config calls it."""
    vocab_size = fields.whole("vocab_size")
    return TrunkShape(
        vocab_size=vocab_size,
        hidden_dim=fields.whole("hidden_size"),
        num_layers=num_layers or fields.whole("num_hidden_layers"),
        norm_eps=fields.real(norm_eps),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.whole("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
    )


def check_activation(fields: Fields, name: str = "hidden_act") -> None:
    """Refuses an activation other than SiLU."""
    if fields.raw.get(name, "silu") not in ("silu", "swish"):
        raise fields.refusal(name, "'silu'; no other activation is supported")


def read_layers(fields: Fields, name: str, meanings: Mapping[str, Meaning]) -> tuple[Meaning, ...]:
    """One meaning for each layer, by the words in the list `name`."""
    words, num_layers = fields.words(name), fields.whole("num_hidden_layers")
    if len(words) != num_layers or any(word not in meanings for word in words):
        raise fields.refusal(name, f"a list of {num_layers} of {', '.join(meanings)}")
    return tuple(meanings[word] for word in words)


def read_attention(
    fields: Fields, scale: float, positions: RotaryPositions | NoPositions
) -> AttentionShape:
    """Full attention with grouped query heads, by the field names that most families share."""
    q_heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of {q_heads}")
    has_bias = fields.flag("attention_bias", False)
    return AttentionShape(q_heads, kv_heads, head_dim_of(fields), scale, has_bias, positions)


def head_dim_of(fields: Fields) -> int:
    hidden_dim, q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "head_dim" not in fields.raw and hidden_dim % q_heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size {hidden_dim}")
    return fields.whole("head_dim", hidden_dim // q_heads)


def read_rotary(fields: Fields, default_factor: float) -> RotaryPositions:
    """Rotary positions over a part of each head, stretched as the rope parameters say."""
    name = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    rope = fields.beneath(name)
    rotary_dim = int(head_dim_of(fields) * rope.real("partial_rotary_factor", default_factor))
    if rotary_dim < 2 or rotary_dim % 2:
        raise rope.refusal("partial_rotary_factor", "such that an even part of a head turns")
    return RotaryPositions(rope.real("rope_theta", 10_000.0), rotary_dim, read_stretch(rope))


def read_mlp(fields: Fields) -> MlpShape:
    """A gated MLP, by the field names that most families share."""
    return MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False))


def read_mamba(
    fields: Fields,
    *,
    inner_dim: int | None = None,
    has_out_bias: bool | None = None,
    gating: Gating = Gating.GATE_THEN_NORM,
) -> MambaShape:
    """A Mamba-2 mixer, by the field names of Bamba, Granite and Falcon-H1.

    Without `inner_dim` it is the expanded hidden size; without `has_out_bias` both projections
    have a bias, or neither.
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


def read_grouped_routing(fields: Fields, experts: MoeShape) -> GroupedRouting:
    """How tokens find their experts in groups, by the field names of DeepSeek."""
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
        fields.real("routed_scaling_factor", 1.0),
    )


def read_dt_limit(fields: Fields) -> tuple[float, float]:
    """The bounds of a time step."""
    limit = fields.raw.get("time_step_limit")
    if limit is None:
        return (0.0, float("inf"))
    try:
        low, high = (float(bound) for bound in limit)
    except (TypeError, ValueError):
        raise fields.refusal("time_step_limit", "two numbers") from None
    if not 0.0 <= low <= high:
        raise fields.refusal("time_step_limit", "two rising numbers from 0")
    return (low, high)


def read_delta(fields: Fields, layout: DeltaLayout) -> DeltaShape:
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


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The generation config says how to stop; without one the model config does."""
    source = fields
    path = fields.source.with_name("generation_config.json")
    if path.exists():
        generation = read_fields(path)
        source = generation if generation.raw.get("eos_token_id") is not None else fields
    ids = source.whole_list("eos_token_id")
    if any(token_id >= vocab_size for token_id in ids):
        raise source.refusal("eos_token_id", f"token ids below vocab_size {vocab_size}")
    return ids
