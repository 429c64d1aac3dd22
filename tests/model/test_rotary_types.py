"""Every way to stretch rotary waves equals transformers', in both dtypes, bit for bit or nearly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families.shapes import MAX_POSITIONS, rope
from tests.oracle import Float64Mode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ferryman.errors import ConfigError
from ferryman.model.fields import Fields
from ferryman.model.rotary import YarnStretch, read_stretch, rotary_frequencies


def _fields(parameters: dict[str, Any]) -> Fields:
    return Fields(Path("config.json"), {"max_position_embeddings": MAX_POSITIONS, **parameters})


def _theirs(parameters: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters),
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq, embedding.attention_scaling


@pytest.mark.parametrize("seed", range(60))
def test_frequencies_and_scaling_equal_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    parameters, head_dim = rope(rng), rng.choice([4, 6, 16, 64])
    if parameters["rope_type"] == "yarn" and seed % 3 == 0:
        parameters |= {"mscale": 1.0, "mscale_all_dim": rng.choice([0.5, 0.8])}
    stretch = read_stretch(_fields(parameters))
    with Float64Mode():
        expected, expected_scaling = _theirs(parameters, head_dim)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        found, scaling = rotary_frequencies(
            parameters["rope_theta"], head_dim, stretch, like=torch.empty(0, dtype=dtype)
        )
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)
        assert scaling == pytest.approx(expected_scaling, rel=1e-15)


def test_the_published_scaling_of_gpt_oss_is_read_whole() -> None:
    stretch = read_stretch(
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
    assert isinstance(stretch, YarnStretch)
    assert (stretch.trained_len, stretch.rounds_ends) == (4096, False)
    assert stretch.attention_factor == pytest.approx(1.3465735902799727)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        pytest.param({"rope_type": "dynamic", "factor": 2.0}, ["rope_type", "dynamic"], id="type"),
        pytest.param({"type": "longrope"}, ["type", "longrope"], id="old name"),
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
        read_stretch(_fields(parameters))
    assert all(word in str(refusal.value) for word in named)
