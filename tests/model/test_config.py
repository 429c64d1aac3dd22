"""A folder that cannot be served is refused by name; one that can be served is read completely."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.model.conftest import FolderOf
from tests.model.families.nemotron_h import nemotron_h

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families import FAMILIES
from ferryman.model.families.granite import BambaConfig, GraniteHybridConfig
from ferryman.model.shapes.attention_shapes import AttentionShape, NoPositions, RotaryPositions
from ferryman.model.shapes.feed_forward_shapes import MoeShape
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.shapes.recurrent_shapes import MambaShape

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def edited(folder_of: FolderOf, tmp_path: Path) -> Callable[[str, Edit], Path]:
    """A folder with only a config.json: the variant's, after the edit."""

    def edit_config(variant: str, edit: Edit) -> Path:
        raw = json.loads((folder_of(variant) / "config.json").read_text())
        edit(raw)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return tmp_path

    return edit_config


def test_families_share_neither_a_name_nor_an_architecture() -> None:
    names = [family.name for family in FAMILIES]
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(set(names)) == len(names)
    assert len(set(architectures)) == len(architectures)


def attention_of(config: ModelConfig) -> AttentionShape:
    """The attention of the first layer that has one."""
    shapes = (shape for layer in config.states for shape in layer)
    return next(shape for shape in shapes if isinstance(shape, AttentionShape))


def mamba_of(config: ModelConfig) -> MambaShape:
    shapes = (shape for layer in config.states for shape in layer)
    return next(shape for shape in shapes if isinstance(shape, MambaShape))


def test_granite_is_read_with_its_multipliers_and_layers(folder_of: FolderOf) -> None:
    config = load_config(folder_of("granite_moe_rope"))
    assert isinstance(config, GraniteHybridConfig)
    assert (config.embedding_multiplier, config.residual_multiplier) == (3.0, 0.7)
    attention, mamba = attention_of(config), mamba_of(config)
    assert (config.logits_scaling, attention.scale) == (1.7, 0.3)
    assert config.mixers.count(mamba) == 3
    assert config.moe == MoeShape(num_experts=4, experts_per_token=3, inner_dim=48)
    assert attention.positions == RotaryPositions(theta=10_000.0, rotary_dim=16)
    assert mamba.dt_limit == (0.05, 0.4)


def test_dense_granite_without_positions_has_neither(folder_of: FolderOf) -> None:
    config = load_config(folder_of("granite_nope"))
    assert isinstance(config, GraniteHybridConfig)
    assert config.moe is None
    assert attention_of(config).positions == NoPositions()


def test_bamba_turns_half_of_each_head(folder_of: FolderOf) -> None:
    config = load_config(folder_of("bamba"))
    assert isinstance(config, BambaConfig)
    assert attention_of(config).positions == RotaryPositions(theta=10_000.0, rotary_dim=8)
    assert attention_of(config).scale == 16**-0.5
    assert mamba_of(config).dt_limit == (0.0, math.inf)


def test_both_spellings_of_layer_types_mean_the_same(
    folder_of: FolderOf, edited: Callable[[str, Edit], Path]
) -> None:
    def spell_as_published(raw: dict[str, Any]) -> None:
        old = {"linear_attention": "mamba", "full_attention": "attention"}
        raw["layers_block_type"] = [old[word] for word in raw.pop("layer_types")]
        raw["position_embedding_type"] = "nope"

    folder = edited("granite_nope", spell_as_published)
    assert load_config(folder).states == load_config(folder_of("granite_nope")).states


def test_nemotrons_letters_mean_the_same_as_its_words(tmp_path: Path) -> None:
    raw = nemotron_h(random.Random(1)).to_dict()
    words = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    raw |= {"architectures": ["NemotronHForCausalLM"], "time_step_limit": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    by_words = load_config(tmp_path)
    raw["hybrid_override_pattern"] = "".join(words[w] for w in raw.pop("layers_block_type"))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path) == by_words


@pytest.fixture
def nemotron(tmp_path: Path) -> Callable[[Edit], ModelConfig]:
    """Reads a config of Nemotron-H after an edit."""

    def read(edit: Edit) -> ModelConfig:
        raw = nemotron_h(random.Random(1)).to_dict()
        raw |= {"architectures": ["NemotronHForCausalLM"], "time_step_limit": [0.0, INFINITE]}
        edit(raw)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return load_config(tmp_path)

    return read


def test_nemotrons_first_configs_call_the_head_dim_by_another_name(
    nemotron: Callable[[Edit], ModelConfig],
) -> None:
    present = nemotron(lambda raw: raw.update(head_dim=6))
    former = nemotron(lambda raw: (raw.pop("head_dim"), raw.update(attention_head_dim=6)))
    assert attention_of(former) == attention_of(present)
    assert attention_of(former).head_dim == 6


def test_nemotrons_time_steps_are_bounded_by_the_limit_alone(
    nemotron: Callable[[Edit], ModelConfig],
) -> None:
    """`time_step_min` says how time steps were drawn before training."""
    free = nemotron(lambda raw: raw.update(time_step_min=0.1))
    assert mamba_of(free).dt_limit == (0.0, math.inf)
    bounded = nemotron(lambda raw: raw.update(time_step_limit=[0.05, 0.4]))
    assert mamba_of(bounded).dt_limit == (0.05, 0.4)


def test_fields_that_no_layer_uses_are_not_read(
    nemotron: Callable[[Edit], ModelConfig], edited: Callable[[str, Edit], Path]
) -> None:
    """granite-4.0-micro has fields of Mamba-2 that fit no layer, and none that has one."""

    def without_mamba(raw: dict[str, Any]) -> None:
        raw.update(layer_types=["full_attention"] * 5, mamba_d_head=17, mamba_n_heads=None)

    granite = load_config(edited("granite_rope", without_mamba))
    assert [len(shapes) for shapes in granite.states] == [1] * 5
    assert attention_of(granite).head_dim == 16

    def without_attention(raw: dict[str, Any]) -> None:
        raw.update(layers_block_type=["mamba", "mlp"], n_routed_experts=None, head_dim=None)

    assert len(nemotron(without_attention).states) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_hidden_act", "gelu"),
        ("sliding_window", 64),
        ("attention_bias", True),
        ("n_groups", 4),
        ("layers_block_type", ["linear_attention", "convolution"]),
    ],
)
def test_what_nemotron_does_not_support_is_refused_by_name(
    field: str, value: object, tmp_path: Path
) -> None:
    raw = nemotron_h(random.Random(1)).to_dict()
    raw |= {"architectures": ["NemotronHForCausalLM"], field: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=field):
        load_config(tmp_path)


def test_the_generation_config_says_where_to_stop(edited: Callable[[str, Edit], Path]) -> None:
    folder = edited("bamba", lambda raw: raw.update(eos_token_id=5))
    assert load_config(folder).trunk.eos_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_config(folder).trunk.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        pytest.param(
            lambda raw: raw.update(architectures=["BloomForCausalLM"]),
            ["BloomForCausalLM", "nobody has compared", "`ferryman models`"],
            id="unknown architecture",
        ),
        pytest.param(lambda raw: raw.pop("architectures"), ["architectures"], id="no architecture"),
        pytest.param(lambda raw: raw.pop("hidden_size"), ["hidden_size", "missing"], id="missing"),
        pytest.param(
            lambda raw: raw.update(vocab_size="many"), ["vocab_size", "many"], id="wrong type"
        ),
        pytest.param(lambda raw: raw.update(vocab_size=True), ["vocab_size"], id="bool for int"),
        pytest.param(
            lambda raw: raw.update(rms_norm_eps=[]), ["rms_norm_eps"], id="list for float"
        ),
        pytest.param(
            lambda raw: raw.update(tie_word_embeddings=1), ["tie_word"], id="int for bool"
        ),
        pytest.param(lambda raw: raw["layer_types"].pop(), ["layer_types", "5"], id="short layers"),
        pytest.param(
            lambda raw: raw.update(layer_types=["lstm"] * 5), ["layer_types"], id="unknown layer"
        ),
        pytest.param(lambda raw: raw.update(hidden_act="gelu"), ["hidden_act"], id="activation"),
        pytest.param(
            lambda raw: raw.update(rope_parameters={"rope_type": "axial"}),
            ["rope_type", "axial"],
            id="rope type",
        ),
        pytest.param(lambda raw: raw.update(mamba_n_groups=3), ["mamba_n_groups"], id="groups"),
        pytest.param(lambda raw: raw.update(mamba_d_head=17), ["mamba_n_heads"], id="ssm heads"),
        pytest.param(lambda raw: raw.update(num_key_value_heads=3), ["num_key_value"], id="gqa"),
        pytest.param(lambda raw: raw.update(num_experts_per_tok=9), ["num_experts"], id="experts"),
        pytest.param(lambda raw: raw.update(time_step_limit=[2, 1]), ["time_step"], id="dt limit"),
        pytest.param(lambda raw: raw.update(eos_token_id=4096), ["eos_token_id"], id="eos id"),
    ],
)
def test_an_unusable_config_is_refused_by_field_and_file(
    edit: Edit, named: list[str], edited: Callable[[str, Edit], Path]
) -> None:
    folder = edited("granite_moe_rope", edit)
    with pytest.raises(ConfigError) as refusal:
        load_config(folder)
    for word in [*named, str(folder / "config.json")]:
        assert word in str(refusal.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_longer_context_beside_other_rotations_is_refused(
    edited: Callable[[str, Edit], Path],
) -> None:
    """transformers and vLLM take `rope_scaling` then, which is what people add to a folder."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    both = {"rope_parameters": rope, "rope_scaling": YARN}
    with pytest.raises(ConfigError, match="'rope_scaling' must be left out beside rope_parameters"):
        load_config(edited("granite_moe_rope", lambda raw: raw.update(both)))
    same = {"rope_parameters": YARN, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    load_config(edited("granite_moe_rope", lambda raw: raw.update(same)))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "nowhere")


def test_a_config_that_is_no_json_is_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    shutil.copy(folder_of("bamba") / "model.safetensors", tmp_path / "config.json")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_config(tmp_path)


INFINITE = {"__float__": "Infinity"}
NO_FACTORS: list[Any] = [0, -1.0, 1e39, 1e-60, INFINITE, math.nan, True, "1"]
FACTORS = [
    ("granite_rope", "logits_scaling"),
    ("granite_rope", "embedding_multiplier"),
    ("granite_rope", "residual_multiplier"),
    ("granite_rope", "attention_multiplier"),
    ("granite_rope", "rms_norm_eps"),
    ("bamba", "rms_norm_eps"),
    ("gemma3", "query_pre_attn_scalar"),
    ("gpt_oss", "swiglu_limit"),
    ("gpt_oss", "swiglu_alpha"),
]


@pytest.mark.parametrize("value", NO_FACTORS, ids=repr)
@pytest.mark.parametrize(("variant", "name"), FACTORS)
def test_a_factor_that_makes_no_numbers_is_refused(
    variant: str, name: str, value: object, edited: Callable[[str, Edit], Path]
) -> None:
    folder = edited(variant, lambda raw: raw.update({name: value}))
    with pytest.raises(ConfigError, match=f"'{name}' must be a finite number above 0"):
        load_config(folder)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4}
ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"rope_theta": -10_000.0}, "rope_theta"),
    ({"rope_theta": 1.0}, "rope_theta"),
    ({"rope_theta": INFINITE}, "rope_theta"),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
    ({"rope_type": "linear", "factor": 0}, "factor"),
    ({**YARN, "beta_fast": 0}, "beta_fast"),
    ({**YARN, "beta_slow": -1}, "beta_slow"),
    ({**YARN, "attention_factor": INFINITE}, "attention_factor"),
    ({**YARN, "mscale": -1, "mscale_all_dim": 1}, "mscale"),
    ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor"),
]


@pytest.mark.parametrize(("rope", "name"), ROPE, ids=str)
def test_rope_parameters_that_make_no_numbers_are_refused(
    rope: dict[str, Any], name: str, edited: Callable[[str, Edit], Path]
) -> None:
    folder = edited("granite_rope", lambda raw: raw.update(rope_parameters=rope))
    with pytest.raises(ConfigError, match=f"'{name}' must be"):
        load_config(folder)


@pytest.mark.parametrize(
    "limit", [[0, 0], [INFINITE, INFINITE], [-1, 1], [math.nan, 1], [1, 0]], ids=str
)
def test_bounds_of_a_time_step_that_allow_none_are_refused(
    limit: list[Any], edited: Callable[[str, Edit], Path]
) -> None:
    folder = edited("granite_rope", lambda raw: raw.update(time_step_limit=limit))
    with pytest.raises(ConfigError, match="'time_step_limit' must be"):
        load_config(folder)


def test_a_cap_of_logits_may_be_absent_but_not_negative(
    edited: Callable[[str, Edit], Path],
) -> None:
    load_config(edited("gemma3", lambda raw: raw.update(final_logit_softcapping=None)))
    load_config(edited("gemma3", lambda raw: raw.update(final_logit_softcapping=0)))
    folder = edited("gemma3", lambda raw: raw.update(final_logit_softcapping=-30.0))
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        load_config(folder)


@pytest.mark.parametrize(
    "widths",
    [
        {"hidden_size": None, "embedding_dim": 4096},
        {"hidden_size": 4096, "embedding_dim": None},
        {"embedding_dim": 4096},
    ],
)
def test_null_is_no_name_of_a_width(widths: dict[str, int | None], tmp_path: Path) -> None:
    """xLSTM's config may name its width in either of two ways."""
    path = Path(__file__).parent / "published" / "NX-AI--xLSTM-7b.json"
    raw = json.loads(path.read_text())["config"]
    rest = {name: raw[name] for name in raw if name not in ("hidden_size", "embedding_dim")}
    (tmp_path / "config.json").write_text(json.dumps({**rest, **widths}))
    assert load_config(tmp_path).trunk.hidden_dim == 4096
