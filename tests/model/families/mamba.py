from __future__ import annotations

import random

from tests.model.families.mamba_alone_shapes import mamba1_alone
from transformers import MambaConfig, PretrainedConfig


def random_config(rng: random.Random) -> PretrainedConfig:
    return MambaConfig(**mamba1_alone(rng))
