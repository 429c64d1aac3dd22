"""Graphs on a card: a replayed step has the bits of the launched one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.native import native_config, save_native

from ferryman.llm import LLM, Completion
from ferryman.schedule.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[(7 * i * i + 3 * i + row) % 120 + 3 for i in range(12 + 9 * row)] for row in range(5)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True, logprobs=3),
]


def answers(folder: Path, **options: object) -> list[Sequence[Completion]]:
    with LLM(folder, device="cuda", page_size=16, memory_bytes=1 << 28, **options) as llm:
        return [llm.generate(PROMPTS, params) for params in PARAMS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["", "ngram"])
def test_replayed_steps_on_a_card_have_the_bits_of_launched_ones(
    dtype: str, draft: str, tmp_path: Path
) -> None:
    folder = save_native(tmp_path, native_config())
    found = answers(folder, dtype=dtype, draft=draft)
    assert found == answers(folder, dtype=dtype, draft=draft, replay_steps=False)


def test_float64_on_a_card_says_what_the_processor_says(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config())
    found = answers(folder, dtype="float64")
    with LLM(folder, dtype="float64", page_size=16, memory_bytes=1 << 28) as llm:
        expected = [llm.generate(PROMPTS, params) for params in PARAMS]
    for some, others in zip(found, expected, strict=True):
        assert [c.token_ids for c in some] == [c.token_ids for c in others]


def test_a_replayed_chunk_on_a_card_has_the_bits_of_the_launched_one(tmp_path: Path) -> None:
    """One prompt in a step, cold and from the device, with a page end within it."""
    folder, answered = save_native(tmp_path, native_config()), []
    for replay_steps in (True, False):
        options = {"page_size": 16, "memory_bytes": 1 << 28, "replay_steps": replay_steps}
        with LLM(folder, device="cuda", dtype="bfloat16", exactness="bits", **options) as llm:
            prompts = (*PROMPTS, *PROMPTS, PROMPTS[4] + PROMPTS[3])
            answered.append([llm.generate([prompt], PARAMS[0]) for prompt in prompts])
    assert answered[0] == answered[1]
