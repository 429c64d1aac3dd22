"""Tiny models by name: those of published families, and the native one with all kinds of state."""

from __future__ import annotations

from pathlib import Path

from tests.native import native_config, save_native
from tests.tiny_models import save_tiny_model

NATIVE = "native"


def save_variant(folder: Path, name: str) -> Path:
    """Writes the tiny model `name` with random weights into `folder`, in float32."""
    if name == NATIVE:
        return save_native(folder, native_config())
    return save_tiny_model(folder, name)
