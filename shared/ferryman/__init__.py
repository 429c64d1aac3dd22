"""Ferryman's library: the pure core, the device work, the wire, and the SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferryman.llm import LLM as LLM
    from ferryman.llm import Completion as Completion
    from ferryman.schedule.request import SamplingParams as SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Loads the offline engine only when asked for: a router needs no torch."""
    if name in ("LLM", "Completion"):
        from ferryman import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from ferryman.schedule.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'ferryman' has no attribute {name!r}")
