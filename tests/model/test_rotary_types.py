"""Every scaling of rotary waves equals transformers' in both dtypes, to the bit or nearly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families.shapes import MAX_POSITIONS, rope
from tests.oracle import Float64Mode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ferryman.errors import ConfigError
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.rotary import YarnScaling, read_scaling, rotary_frequencies


def _fields(parameters: dict[str, Any]) -> ConfigFields:
    return ConfigFields(
        Path("config.json"), {"max_position_embeddings": MAX_POSITIONS, **parameters}
    )


def _theirs(parameters: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq, embedding.attention_scaling


LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 7.0, 11.0],
}


@pytest.mark.parametrize("trained_len", [16, MAX_POSITIONS])
@pytest.mark.parametrize("extra", [{}, {"factor": 3.0}, {"attention_factor": 0.7}], ids=str)
def test_longrope_has_the_waves_of_texts_as_long_as_the_context(
    trained_len: int, extra: dict[str, Any]
) -> None:
    parameters = {**LONG, **extra, "rope_theta": 1e4}
    parameters["original_max_position_embeddings"] = trained_len
    with Float64Mode():
        config = LlamaConfig(
            head_dim=6, max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(parameters)
        )
        expected, expected_scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=MAX_POSITIONS)
    stretch = read_scaling(_fields(parameters))
    found, scaling = rotary_frequencies(1e4, 6, stretch, torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-15)


def test_dynamic_waves_stay_within_the_context() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    with Float64Mode():
        expected, _ = _theirs(parameters, 16)
    stretch = read_scaling(_fields(parameters))
    found, _ = rotary_frequencies(1e4, 16, stretch, torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("seed", range(60))
def test_frequencies_and_scaling_equal_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    parameters, head_dim = rope(rng), rng.choice([4, 6, 16, 64])
    if parameters["rope_type"] == "yarn" and seed % 3 == 0:
        parameters |= {"mscale": 1.0, "mscale_all_dim": rng.choice([0.5, 0.8])}
    stretch = read_scaling(_fields(parameters))
    with Float64Mode():
        expected, expected_scaling = _theirs(parameters, head_dim)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        found, scaling = rotary_frequencies(parameters["rope_theta"], head_dim, stretch, dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)
        assert scaling == pytest.approx(expected_scaling, rel=1e-15)


def test_the_published_scaling_of_gpt_oss_is_read_whole() -> None:
    stretch = read_scaling(
        _fields(
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        )
    )
    assert isinstance(stretch, YarnScaling)
    assert (stretch.trained_len, stretch.rounds_ends) == (4096, False)
    assert stretch.attention_factor == pytest.approx(1.3465735902799727)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        pytest.param({"rope_type": "axial", "factor": 2.0}, ["rope_type", "axial"], id="type"),
        pytest.param({"type": "axial"}, ["type", "axial"], id="old name"),
        pytest.param({"rope_type": "longrope"}, ["original_max"], id="no trained length"),
        pytest.param({**LONG, "long_factor": [1.0, 0.0]}, ["long_factor"], id="a factor of zero"),
        pytest.param({**LONG, "long_factor": "2"}, ["long_factor"], id="no list"),
        pytest.param({"rope_type": "dynamic"}, ["factor"], id="no dynamic factor"),
        pytest.param({"rope_type": ["yarn"]}, ["rope_type", "yarn"], id="no word"),
        pytest.param({"rope_type": "linear"}, ["factor"], id="no factor"),
        pytest.param({"rope_type": "linear", "factor": 0}, ["factor"], id="zero"),
        pytest.param(
            {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1},
            ["high_freq_factor"],
            id="turned round",
        ),
    ],
)
def test_what_cannot_be_stretched_is_refused_by_name(
    parameters: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_scaling(_fields(parameters))
    assert all(word in str(refusal.value) for word in named)
