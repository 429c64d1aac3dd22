"""FalconMamba: Mamba whose dt, B and C go through norms without weights before the scan."""

from __future__ import annotations

from dataclasses import replace

from ferryman.model.families.mamba import (
    MambaConfig,
    load_mamba_decoder,
    read_mamba1,
    read_mamba_config,
)
from ferryman.model.family import Family
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.recurrent_shapes import InnerNorms


def _read(fields: ConfigFields) -> MambaConfig:
    plain = read_mamba1(fields.with_defaults(time_step_rank="auto"))
    eps = fields.positive("mixer_rms_eps", 1e-6)
    mamba = replace(plain, norms=InnerNorms.WITHOUT_WEIGHTS, norm_eps=eps)
    return read_mamba_config(fields, mamba)


FAMILY = Family(("FalconMambaForCausalLM",), _read, load_mamba_decoder)
