"""The documents name existing files, and the sources hold the words of other servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (ROOT, ROOT / "shared" / "ferryman", ROOT / "services")
NAME = re.compile(r"`([\w.-]+(?:/[\w.-]*)+)`")


@pytest.mark.parametrize(
    "document",
    ["docs/glossary.md", "docs/architecture.md", "docs/journeys.md", "CONTRIBUTING.md"],
)
def test_every_file_that_is_named_exists(document: str) -> None:
    names = NAME.findall((ROOT / document).read_text())
    assert len(names) > 10, "the pattern finds the names"
    lost = [name for name in names if not any((room / name).exists() for room in ROOMS)]
    assert lost == []


WORDS_OF_OTHERS = (
    *("radix tree", "prefix cache", "KV cache", "KV block", "block table", "ref count", "lock ref"),
    *("preempt", "offload", "onload", "KV transfer", "speculative decoding", "Mamba checkpoint"),
    *("backpressure", "heartbeat", "tensor parallel", "HiCache"),
    *("match_prefix", "disaggregation", "tp_rank", "chunked prefill", "sliding window"),
)


@pytest.mark.parametrize("word", WORDS_OF_OTHERS)
def test_a_word_of_other_servers_leads_to_the_place(word: str) -> None:
    """An engineer who knows vLLM or SGLang searches the sources for its words."""
    rooms = (ROOT / "shared" / "ferryman", ROOT / "services")
    texts = (path.read_text().lower() for room in rooms for path in room.rglob("*.py"))
    assert any(word.lower() in text for text in texts)
