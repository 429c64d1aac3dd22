"""A model under bits on a card: a chunk, a batch and a decode step have the cold run's logits.

Triton's interpreter stands for the card. It shows that everything between a token and its logits
takes one order of sums by design; that a card's instructions keep to it is asked on a card
(`python -m tools.campaigns.card_bits`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.engine.test_step_graphs import SMALL
from tests.kernels.like_a_card import on_a_card
from tests.model.paged_run import PagedRun, Part
from tests.model.telling import ALL_FAMILIES, NATIVE, save_telling
from tests.native import save_native
from torch import Tensor

from ferryman.model.families import gpt_oss, nemotron_h
from ferryman.model.layers import moe
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.experts import load_experts_for
from ferryman.model.load_options import LoadOptions
from ferryman.model.one_order import OneOrderLinear
from ferryman.model.registry import load_model
from ferryman.model.weights import linear
from ferryman.sizing.exactness import _FAMILIES_WITH_MEANS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for it")

ARITHMETIC = "cuda/9.0-nvidia-h200/float32/r00000000/tp1"
PAGE_SIZE, LENGTH, DECODED = 16, 23, 3
WITH_BITS = [family for family in ALL_FAMILIES if family not in _FAMILIES_WITH_MEANS]
FAMILIES = WITH_BITS if "FERRYMAN_TEST_ALL_CELLS" in os.environ else (NATIVE,)


@pytest.fixture(autouse=True)
def _layers_of_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load = partial(load_experts_for, torch.device("cuda"))
    for module in (moe, gpt_oss, nemotron_h):
        monkeypatch.setattr(module, "load_experts_for", lambda _, *given: load(*given))
    monkeypatch.setattr(linear, "packed_bytes", lambda weight: 0)
    with on_a_card():
        yield


def loaded(folder: Path, family: str, arithmetic: str) -> Decoder:
    if family == NATIVE:
        save_native(folder, SMALL)
    else:
        save_telling(folder, family, PAGE_SIZE, 64)
    options = LoadOptions("float32", page_size=PAGE_SIZE, arithmetic=arithmetic)
    return load_model(folder, options)


def tokens(seed: int, length: int) -> list[int]:
    return [(7 * i * i + 3 * i + seed) % 40 + 3 for i in range(length)]


def cold(model: Decoder, prompt: list[int]) -> Tensor:
    run = PagedRun(model)
    return run.prefill([Part(run.start(), prompt)])[0]


def cut_and_decoded(model: Decoder, prompt: list[int]) -> Tensor:
    """Two chunks, each beside another request, then single tokens beside it."""
    run = PagedRun(model, seed=1)
    lane, other = run.start(), run.start()
    rows = list[Tensor]()
    for low, high in ((0, PAGE_SIZE), (PAGE_SIZE, len(prompt) - DECODED)):
        parts = [Part(other, tokens(low, 5)), Part(lane, prompt[low:high])]
        rows.append(run.prefill(parts)[1])
    for token in prompt[-DECODED:]:
        rows.append(run.decode([other, lane], [9, token])[1:])
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_batches_and_single_tokens_have_the_cold_run_s_bits(
    family: str, tmp_path: Path
) -> None:
    model, prompt = loaded(tmp_path, family, ARITHMETIC), tokens(1, LENGTH)
    assert isinstance(model.ends.head, OneOrderLinear)
    assert torch.equal(cut_and_decoded(model, prompt), cold(model, prompt))


def test_the_fastest_kernels_are_caught(tmp_path: Path) -> None:
    model, prompt = loaded(tmp_path, NATIVE, "any"), tokens(1, LENGTH)
    found, expected = cut_and_decoded(model, prompt), cold(model, prompt)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
