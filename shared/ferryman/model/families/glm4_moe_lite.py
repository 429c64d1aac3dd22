"""GLM-4.7-Flash (GLM-4-MoE-Lite): DeepSeek-V3's latent attention and experts in a smaller model."""

from __future__ import annotations

from ferryman.model.families.deepseek_v3 import DeepseekConfig, load_deepseek, read_deepseek
from ferryman.model.family import Family
from ferryman.model.shapes.config_fields import ConfigFields

DEFAULTS = {"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
"""The meaning of fields that a published config leaves out."""


def _read(given: ConfigFields) -> DeepseekConfig:
    return read_deepseek(ConfigFields(given.source, {**DEFAULTS, **given.raw}))


FAMILY = Family(("Glm4MoeLiteForCausalLM",), _read, load_deepseek)
