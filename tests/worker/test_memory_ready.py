"""Memory that no prompt had yet is written for the first time beside the event loop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.engine.host_fed import PAGE_SIZE
from tests.harness.pair import hand_off, pair_on
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.telling import save_telling
from torch import Tensor

from ferryman.cache.manifest import KindLayout
from ferryman.engine.memory import slabs
from ferryman.schedule.request import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(75)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


async def test_a_hand_off_fills_no_slab_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot is a stretch of its own here, so the prompt needs dozens that nobody had."""
    monkeypatch.setattr(slabs, "STRETCH_BYTES", 1)
    fill, on_loop, beside = slabs.fill_slab, list[int](), list[int]()
    me = threading.get_ident()

    def watched(slab: Tensor, layout: KindLayout) -> None:
        (on_loop if threading.get_ident() == me else beside).append(len(slab))
        fill(slab, layout)

    folder = save_telling(tmp_path, "granite", PAGE_SIZE, 64)
    async with pair_on(folder, "grpc") as pair:
        monkeypatch.setattr(slabs, "fill_slab", watched)
        await hand_off(pair, "long", PROMPT, GREEDY)
        answer, _ = await pair.read_answer("long")
    assert len(answer.token_ids) == 4
    num_pages = len(PROMPT) // PAGE_SIZE
    assert len(beside) >= 2 * num_pages, "at prefill and at decode"
    # Decoding grows by a slot at a time.
    assert len(on_loop) <= 3
