"""The common fields of the configs of Mamba and FalconMamba."""

from __future__ import annotations

import random
from typing import Any

from tests.model.families.shapes import trunk


def mamba1_alone(rng: random.Random) -> dict[str, Any]:
    """Odd numbers of channels, states and ranks of dt."""
    sizes = trunk(rng, rng.randint(1, 4))
    sizes["layer_norm_epsilon"] = sizes.pop("rms_norm_eps")
    sizes.pop("max_position_embeddings")
    return {
        **sizes,
        "hidden_size": rng.choice([24, 35, 48]),
        "state_size": rng.choice([3, 8, 16]),
        "expand": rng.choice([1, 2]),
        "conv_kernel": rng.choice([2, 3, 4]),
        "time_step_rank": rng.choice(["auto", 1, 5]),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.5,
        "residual_in_fp32": rng.random() < 0.5,
    }
