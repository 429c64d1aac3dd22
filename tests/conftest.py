"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton builds its own library for the interpreter or for a GPU when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
