"""The plan of a model with several residual streams holds what its largest step does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.model.comparison import architecture_of, random_config

from ferryman.model.config import load_config
from ferryman.model.families.hy_v4 import HyV4Config
from ferryman.model.families.qwen4_exp import read_qwen4_exp
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.settings.engine import EngineOptions
from ferryman.sizing.worker_size import PROCESS_BYTES, step_bytes, stream_bytes

PUBLISHED = Path(__file__).parents[1] / "model" / "published" / "Qwen--Qwen3.8-Flash-Next.json"
MEASURED = [("bfloat16", 512, 207), ("bfloat16", 2048, 554), ("float32", 512, 283)]
"""The peak of a prompt's chunk over what stood before it, in MB, in two layers of the published
widths, with a vocabulary of 2,000 (Intel Xeon family 6 model 167)."""


def written(folder: Path, family: str) -> Path:
    """A folder with the config of a small model, and nothing else."""
    config = random_config(family, 1)
    config.architectures = [architecture_of(config)]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dtype", "chunk_tokens", "measured"), MEASURED)
def test_the_plan_of_published_widths_covers_what_was_measured(
    dtype: str, chunk_tokens: int, measured: int
) -> None:
    config = read_qwen4_exp(ConfigFields(PUBLISHED, json.loads(PUBLISHED.read_text())["config"]))
    narrow = replace(config, trunk=replace(config.trunk, vocab_size=2000))
    given: dict[str, Any] = {"dtype": dtype, "max_running": 1, "replay_steps": False}
    options = EngineOptions(model=PUBLISHED.parent, chunk_tokens=chunk_tokens, **given)
    assert step_bytes(narrow, options) - PROCESS_BYTES > measured * 10**6


@pytest.mark.parametrize("family", ["qwen4_exp", "deepseek_v4", "hy_v4", "gemma3n"])
def test_a_step_counts_each_stream(family: str, tmp_path: Path) -> None:
    config: Any = load_config(written(tmp_path, family))
    more = replace(config, streams=replace(config.streams, count=config.streams.count + 1))
    options = EngineOptions(model=tmp_path, dtype="float32", chunk_tokens=512)
    stream = 512 * config.trunk.hidden_dim * 4
    assert step_bytes(more, options) - step_bytes(config, options) >= 4 * stream


def test_a_model_without_its_streams_is_planned_less(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "hy_v4"))
    assert isinstance(config, HyV4Config)
    options = EngineOptions(model=tmp_path, dtype="float32", chunk_tokens=512)
    assert step_bytes(config, options) > step_bytes(config.sparse, options)
    assert stream_bytes(config.sparse, options) == 0
