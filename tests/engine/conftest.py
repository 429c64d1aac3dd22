"""Fixtures that tests of an engine without a card share."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ferryman.model.families import gpt_oss, nemotron_h
from ferryman.model.layers import moe
from ferryman.model.layers.experts import load_experts_for
from ferryman.model.weights import linear


@pytest.fixture
def layers_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded on the processor with the layers that a card gets."""
    load = partial(load_experts_for, torch.device("cuda"))
    for module in (moe, gpt_oss, nemotron_h):
        monkeypatch.setattr(module, "load_experts_for", lambda _, *given: load(*given))
    monkeypatch.setattr(linear, "packed_bytes", lambda weight: 0)  # no panels, so torch multiplies
