"""A layer's last sum, left to the next layer's norm, has the bits of one that is added at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.model.families.granite import granite
from tests.tiny_models import cleared_state, save_random
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import DecoderLayer
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import PrefillBatch

TOKENS = 19
CPU = torch.device("cpu")


def closed_at_once(model: Decoder, batch: PrefillBatch) -> Tensor:
    """The hidden states, layer after layer, each of which adds its own last sum."""
    hidden, state = model.ends.embed(batch.token_ids), cleared_state(model, CPU)
    for layer in model.layers:
        hidden = layer.forward(hidden, batch, state)
    return hidden


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@torch.inference_mode()
def test_a_sum_left_open_has_the_bits_of_one_closed(dtype: str, tmp_path: Path) -> None:
    folder = save_random(tmp_path, granite(random.Random(5)), 5)
    model = load_model(folder, LoadOptions(dtype, page_size=16))
    assert isinstance(model, Decoder)
    assert sum(isinstance(layer, DecoderLayer) for layer in model.layers) >= 2
    whole, slots = torch.arange(TOKENS), torch.zeros(1, dtype=torch.int64)
    tables: dict[Kind, Tensor] = {
        kind: torch.tensor([[1, 2]]) for kind in model.manifest.kinds if kind is Kind.FULL
    }
    batch = PrefillBatch(
        whole + 3, whole, torch.zeros_like(whole), ((0, TOKENS),), tables, slots, (), whole[-1:]
    )
    assert torch.equal(
        model.hidden_states(batch, cleared_state(model, CPU)), closed_at_once(model, batch)
    )
