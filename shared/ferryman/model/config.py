"""Reads `config.json` of a Hugging Face folder into one frozen, typed config per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.model.fields import Fields, read_fields
from ferryman.model.shapes import (
    AttentionShape,
    MambaShape,
    Mixer,
    MlpShape,
    MoeShape,
    NoPositions,
    RotaryPositions,
    TrunkShape,
)

GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
BAMBA = "BambaForCausalLM"

# transformers renamed the layer types; both spellings are on disk.
_MIXERS = {
    "mamba": Mixer.MAMBA,
    "linear_attention": Mixer.MAMBA,
    "attention": Mixer.ATTENTION,
    "full_attention": Mixer.ATTENTION,
}


@dataclass(frozen=True, slots=True)
class GraniteHybridConfig:
    """Granite 4 H. `moe` is None for a dense model; the shared MLP is always there."""

    trunk: TrunkShape
    attention: AttentionShape
    mamba: MambaShape
    shared_mlp: MlpShape
    moe: MoeShape | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


@dataclass(frozen=True, slots=True)
class BambaConfig:
    """Bamba: Mamba-2 and attention with partial rotary positions, a gated MLP in every layer."""

    trunk: TrunkShape
    attention: AttentionShape
    mamba: MambaShape
    mlp: MlpShape


ModelConfig = GraniteHybridConfig | BambaConfig


def load_config(folder: Path | str) -> ModelConfig:
    """The config of the model in `folder`; raises ConfigError saying what is wrong with it."""
    fields = read_fields(Path(folder) / "config.json")
    architectures = fields.words("architectures")
    for name in architectures:
        if name in _READERS:
            _check_activation(fields)
            return _READERS[name](fields)
    raise ConfigError(
        f"{fields.source}: architecture {', '.join(architectures) or '(none)'} is not supported; "
        f"supported are {', '.join(_READERS)}"
    )


def _granite_hybrid(fields: Fields) -> GraniteHybridConfig:
    uses_rope = fields.raw.get("position_embedding_type") == "rope"
    positions = _rotary(fields, default_factor=1.0) if uses_rope else NoPositions()
    return GraniteHybridConfig(
        trunk=_trunk(fields, _layer_types(fields)),
        attention=_attention(fields, fields.real("attention_multiplier", 1.0), positions),
        mamba=_mamba(fields),
        shared_mlp=MlpShape(fields.whole("shared_intermediate_size"), has_bias=False),
        moe=_moe(fields),
        embedding_multiplier=fields.real("embedding_multiplier", 1.0),
        residual_multiplier=fields.real("residual_multiplier", 1.0),
        logits_scaling=fields.real("logits_scaling", 1.0),
    )


def _bamba(fields: Fields) -> BambaConfig:
    scale = _head_dim(fields) ** -0.5
    return BambaConfig(
        trunk=_trunk(fields, _attention_indices(fields)),
        attention=_attention(fields, scale, _rotary(fields, default_factor=0.5)),
        mamba=_mamba(fields),
        mlp=MlpShape(fields.whole("intermediate_size"), fields.flag("mlp_bias", False)),
    )


_READERS: Mapping[str, Callable[[Fields], ModelConfig]] = {
    GRANITE_HYBRID: _granite_hybrid,
    BAMBA: _bamba,
}
SUPPORTED_ARCHITECTURES = tuple(_READERS)


def _trunk(fields: Fields, mixers: tuple[Mixer, ...]) -> TrunkShape:
    vocab_size = fields.whole("vocab_size")
    return TrunkShape(
        vocab_size=vocab_size,
        hidden_dim=fields.whole("hidden_size"),
        mixers=mixers,
        norm_eps=fields.real("rms_norm_eps"),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.whole("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(fields, vocab_size),
    )


def _layer_types(fields: Fields) -> tuple[Mixer, ...]:
    name = "layer_types" if "layer_types" in fields.raw else "layers_block_type"
    types, num_layers = fields.words(name), fields.whole("num_hidden_layers")
    if len(types) != num_layers or any(word not in _MIXERS for word in types):
        raise fields.refusal(name, f"a list of {num_layers} of {', '.join(_MIXERS)}")
    return tuple(_MIXERS[word] for word in types)


def _attention_indices(fields: Fields) -> tuple[Mixer, ...]:
    indices, num_layers = (
        fields.whole_list("attn_layer_indices"),
        fields.whole("num_hidden_layers"),
    )
    if any(index >= num_layers for index in indices):
        raise fields.refusal("attn_layer_indices", f"layer indices below {num_layers}")
    return tuple(Mixer.ATTENTION if i in indices else Mixer.MAMBA for i in range(num_layers))


def _attention(
    fields: Fields, scale: float, positions: RotaryPositions | NoPositions
) -> AttentionShape:
    q_heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of {q_heads}")
    has_bias = fields.flag("attention_bias", False)
    return AttentionShape(q_heads, kv_heads, _head_dim(fields), scale, has_bias, positions)


def _head_dim(fields: Fields) -> int:
    hidden_dim, q_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "head_dim" not in fields.raw and hidden_dim % q_heads:
        raise fields.refusal("num_attention_heads", f"a divisor of hidden_size {hidden_dim}")
    return fields.whole("head_dim", hidden_dim // q_heads)


def _rotary(fields: Fields, default_factor: float) -> RotaryPositions:
    nested = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise fields.refusal("rope_parameters", "an object")
    rope = Fields(fields.source, {**fields.raw, **nested})
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{fields.source}: rope type {kind!r} is not supported, only 'default'")
    rotary_dim = int(_head_dim(fields) * rope.real("partial_rotary_factor", default_factor))
    if rotary_dim < 2 or rotary_dim % 2:
        raise rope.refusal("partial_rotary_factor", "such that an even part of a head turns")
    return RotaryPositions(rope.real("rope_theta", 10_000.0), rotary_dim)


def _mamba(fields: Fields) -> MambaShape:
    heads = fields.whole("mamba_n_heads")
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
        has_proj_bias=fields.flag("mamba_proj_bias", False),
        dt_limit=_dt_limit(fields),
    )


def _dt_limit(fields: Fields) -> tuple[float, float]:
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


def _moe(fields: Fields) -> MoeShape | None:
    num_experts = fields.whole("num_local_experts", 8, least=0)
    if num_experts == 0:
        return None
    chosen = fields.whole("num_experts_per_tok", 2)
    if chosen > num_experts:
        raise fields.refusal("num_experts_per_tok", f"at most num_local_experts {num_experts}")
    return MoeShape(num_experts, chosen, fields.whole("intermediate_size"))


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


def _check_activation(fields: Fields) -> None:
    if fields.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.refusal("hidden_act", "'silu'; no other activation is supported")
