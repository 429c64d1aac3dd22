"""Models without attention: their state is a recurrent slot, and they keep no pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.oracle import load_oracle
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.load_options import LoadOptions
from ferryman.model.readers.config_readers import POSITIONS_OF_A_RECURRENCE
from ferryman.model.registry import load_model

MAMBAS = ["mamba", "mamba2", "falcon_mamba"]


@pytest.mark.parametrize("family", [*MAMBAS, "rwkv", "xlstm"])
def test_a_model_of_recurrences_keeps_no_pages(family: str, tmp_path: Path) -> None:
    model = load_model(
        save_random(tmp_path, random_config(family, 1), 1), LoadOptions("float32", page_size=16)
    )
    assert model.manifest.kinds == (Kind.RECURRENT,)
    assert model.config.trunk.max_positions == POSITIONS_OF_A_RECURRENCE


@pytest.mark.parametrize("family", MAMBAS)
def test_a_residual_path_in_float32_is_as_near_the_truth_as_that_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """Of a model in bfloat16 whose config has `residual_in_fp32`."""
    config = random_config(family, 3)
    config.residual_in_fp32, config.num_hidden_layers = True, 4
    config.time_step_rank = 5  # a norm of one number is its sign, which rounding may turn
    _check_nearness(save_random(tmp_path, config, 3))


def test_matrix_cells_in_bfloat16_are_as_near_the_truth_as_those_of_transformers(
    tmp_path: Path,
) -> None:
    """Transformers rounds the products of keys and values, and the matrix before it is read. Its
    blocks take no bfloat16 on a CPU, so its chunks are longer than the prompt."""
    config = random_config("xlstm", 3)
    config.chunk_size = 128
    _check_nearness(save_random(tmp_path, config, 3))


def _check_nearness(folder: Path) -> None:
    """A chunk and single tokens in bfloat16 differ from float64 no more than transformers."""
    prompt = random_prompt(random.Random(3), 100, VOCAB_SIZE)
    run = PagedRun(load_model(folder, LoadOptions("bfloat16", page_size=16)))
    lane = run.start()
    (prefilled,) = run.prefill([Part(lane, prompt[:64])])
    ours = torch.cat([prefilled, *(run.decode([lane], [token]) for token in prompt[64:])])
    truth = load_oracle(folder, torch.float64).logits(prompt)
    theirs = load_oracle(folder, torch.bfloat16).logits(prompt)
    assert _spread(ours - truth) < 1.2 * _spread(theirs - truth)


def _spread(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())
