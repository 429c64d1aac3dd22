from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import (
    LAYER_TYPES,
    grouped_heads,
    nested_rope,
    pattern,
    sizes,
    trunk,
    window_len,
)
from transformers import Lfm3Config, PretrainedConfig


def lfm3(rng: random.Random) -> PretrainedConfig:
    num_layers = rng.randint(2, 6)
    fields = trunk(rng, num_layers)
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    return Lfm3Config(
        **fields,
        **{**grouped_heads(rng), "head_dim": rng.choice([4, 8, 16])},
        **sizes(rng),
        attention_bias=rng.random() < 0.5,
        conv_L_cache=rng.choice([2, 3, 7]),
        conv_bias=rng.random() < 0.5,
        sliding_window=window_len(rng),
        use_sandwich_norm=rng.random() < 0.7,
        use_attention_gate=rng.random() < 0.7,
        layer_types=rng.choice([None, pattern(rng, num_layers, ["conv", *LAYER_TYPES])]),
        rope_parameters={word: _rope(rng) for word in LAYER_TYPES},
    )


def _rope(rng: random.Random) -> dict[str, Any]:
    """Waves of a part of the channels, or as elsewhere."""
    share = {"partial_rotary_factor": rng.choice([0.5, 1.0])}
    partly = {"rope_type": "proportional", "rope_theta": rng.choice([1e2, 1e4]), **share}
    return rng.choice([partly, nested_rope(rng)])
