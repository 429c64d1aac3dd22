"""From a model folder to a model that runs."""

from __future__ import annotations

from pathlib import Path

import torch

from ferryman.model.config import family_of, load_config
from ferryman.model.decoder import Model
from ferryman.model.drafted import DraftedModel, join_draft
from ferryman.model.fingerprint import model_fingerprint
from ferryman.model.manifest import state_manifest
from ferryman.model.ranks import ALONE, Group
from ferryman.model.weights import open_weights, torch_dtype


def load_model(
    folder: Path | str,
    dtype: str,
    *,
    device: torch.device | str = "cpu",
    page_size: int = 64,
    group: Group = ALONE,
) -> Model:
    """The model in a Hugging Face folder, ready to run in `dtype` with pages of `page_size`.

    With a group of several ranks, the share of one: its manifest is that of the slots it keeps.
    Raises ConfigError, naming field, tensor or file, for a folder that cannot be served.
    """
    element = torch_dtype(dtype)
    config = load_config(folder)
    weights = open_weights(folder, element, torch.device(device), group)
    fingerprint = model_fingerprint(folder, dtype)
    manifest = state_manifest(config, dtype, page_size, fingerprint, group.num_ranks)
    model: Model = family_of(folder).load(config, manifest, weights)
    return model


def load_drafted(
    folder: Path | str,
    draft_folder: Path | str,
    dtype: str,
    *,
    device: torch.device | str = "cpu",
    page_size: int = 64,
    group: Group = ALONE,
) -> DraftedModel:
    """The model in `folder` with the one in `draft_folder` to propose; both as `load_model`."""
    target, draft = (
        load_model(each, dtype, device=device, page_size=page_size, group=group)
        for each in (folder, draft_folder)
    )
    return join_draft(target, draft, dtype, group)
