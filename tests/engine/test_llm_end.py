"""The offline engine ends with its last reference, also for a caller that never closes it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

from tests.tiny_models import save_tiny_model

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams


def streams() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name in ("forward-stream", "copy-stream")}


def test_an_engine_that_nobody_closes_ends_with_its_last_reference(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bamba")
    before = streams()
    llm = LLM(tmp_path, dtype="float32", page_size=16, memory_bytes=32 << 20)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.0))
    assert streams() > before, "it works in threads"
    del llm
    gc.collect()
    assert streams() == before


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bamba")
    before = streams()
    llm = LLM(tmp_path, dtype="float32", page_size=16, memory_bytes=32 << 20)
    llm.close()
    llm.close()
    assert streams() == before
