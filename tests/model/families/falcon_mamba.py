from __future__ import annotations

import random

from tests.model.families.mamba_alone_shapes import mamba1_alone
from transformers import FalconMambaConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    # A norm over one or two numbers is nearly their sign: it magnifies roundings without bound.
    sizes = {**mamba1_alone(rng), "time_step_rank": rng.choice([4, 5, 7])}
    return FalconMambaConfig(**sizes, mixer_rms_eps=rng.choice([1e-6, 1e-3]))
