"""Properties are about what is true, not how fast: a busy machine fails no test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("runtime", deadline=None)
settings.load_profile("runtime")
