"""Random configs of a family that a number of ranks can share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tests.model.comparison import architecture_of, random_config
from transformers import PretrainedConfig

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest


def cuttable(family: str, num_ranks: int, folder: Path) -> Iterator[PretrainedConfig]:
    """Yields such configs without end; `folder` holds the config.json of the last one."""
    for seed in itertools.count():
        config = random_config(family, seed)
        config.architectures = [architecture_of(config)]
        config.save_pretrained(folder)
        try:
            state_manifest(load_config(folder), "float64", 8, "", num_ranks)
        except ConfigError:
            continue
        yield config
