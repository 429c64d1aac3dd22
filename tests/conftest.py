"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Properties are about what is true, not how fast: a busy machine fails no test.
settings.register_profile("no_clock", deadline=None)
settings.load_profile("no_clock")

if not torch.cuda.is_available():
    # Triton builds its own library for the interpreter or for a GPU when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
