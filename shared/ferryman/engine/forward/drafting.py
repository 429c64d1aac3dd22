"""Loads the model to serve, with a draft model or its own drafting layer if one is asked for."""

from __future__ import annotations

from pathlib import Path

from ferryman.engine.forward.decode_forward import Drafter
from ferryman.engine.forward.step import AS_PLANNED
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted, load_model, load_self_drafting
from ferryman.schedule.drafting import MTP


def load_with_draft(
    folder: Path | str, drafted_by: str, options: LoadOptions
) -> tuple[Model, Drafter]:
    """The model to serve and its drafter, joined in one model if it has state.

    `drafted_by` is empty, MTP, or the folder of a draft model.
    """
    if drafted_by == MTP:
        drafting = load_self_drafting(folder, options)
        return drafting, drafting
    if drafted_by:
        drafted = load_drafted(folder, drafted_by, options)
        return drafted, drafted
    return load_model(folder, options), AS_PLANNED
