"""The bytes of a decode step: weights that are read, and state by request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_models import save_tiny_model
from tools.campaigns.published_sizes import NARROW, saved_model
from tools.card.decode import shown_share
from tools.card.step_bytes import StepBytes, device_copy_rate

from ferryman.errors import ConfigError

HIDDEN, WORDS, LAYERS = 256, 4096, 6


@pytest.fixture(scope="module")
def narrow() -> StepBytes:
    with saved_model(NARROW, 0, "cpu") as (folder, model):
        sizes = StepBytes.of(folder)
        table = model.get_input_embeddings().weight.numel()
        assert table == WORDS * HIDDEN
        # All but the table of embeddings, which is not the head.
        assert sizes.weights == 2 * (model.num_parameters() - table)
    return sizes


def test_a_step_reads_and_writes_recurrent_state_and_reads_keys_and_values(
    narrow: StepBytes,
) -> None:
    # 5 layers of 8 heads × 64 × 128 in float32, and convolutions of 3 columns; one of attention.
    states = 5 * 8 * 64 * 128 * 4
    convolutions = 5 * (8 * 64 + 2 * 128) * 3 * 2
    assert narrow.recurrent == pytest.approx(states + convolutions, rel=0.01)
    assert narrow.full_of_token == 2 * 64 * 2
    assert narrow.step(0, 500) == narrow.weights
    more = narrow.step(3, 500) - narrow.weights
    assert more == 3 * (2 * narrow.recurrent + 500 * narrow.full_of_token)


def test_a_window_is_read_up_to_its_length() -> None:
    sizes = StepBytes(weights=0, recurrent=0, full_of_token=1.0, window_of_token=10.0, window_len=4)
    assert (sizes.step(1, 3), sizes.step(1, 9)) == (33, 49)


def test_a_model_with_experts_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "granite_moe")
    with pytest.raises(ConfigError, match="give a model without experts"):
        StepBytes.of(folder)


def test_a_copy_counts_what_is_read_and_what_is_written() -> None:
    rate = device_copy_rate(torch.device("cpu"))
    assert 1e7 < rate < 1e13


def test_a_share_is_the_bytes_time_by_the_steps() -> None:
    text = shown_share(batch=8, step_seconds=4e-3, step_bytes=6_000_000_000, rate=3e12)
    assert text == "2000 tok/s, 4.00 ms a step of 6,000 MB: 50% of the limit"


def test_steps_that_took_no_time_have_no_share() -> None:
    text = shown_share(batch=8, step_seconds=-1e-6, step_bytes=6_000_000_000, rate=3e12)
    assert text == "the machine is too busy to time so few steps"
