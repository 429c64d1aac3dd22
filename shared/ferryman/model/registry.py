"""Loads a model from its folder: alone, with a draft model, or drafting for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ferryman.model.config import family_of, load_config
from ferryman.model.drafted import DraftedModel, join_draft
from ferryman.model.fingerprint import fingerprint_of
from ferryman.model.layers.decoder import Decoder, Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.mtp_model import (
    SelfDraftingModel,
    join_mtp,
    load_mtp_head,
    mtp_config,
)
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.weights.checkpoint import open_checkpoint
from ferryman.model.weights.load_progress import ByteCount, LoadStage
from ferryman.model.weights.named_weights import Weights


def load_model(folder: Path | str, options: LoadOptions) -> Model:
    """The model in a Hugging Face folder, ready to run.

    With a group of several ranks it is the share of one; its manifest describes that rank's slots.
    Raises ConfigError, naming field, tensor or file, for a folder that cannot be served.
    """
    with _loaded(folder, options) as (model, _):
        return model


@contextmanager
def _loaded(folder: Path | str, options: LoadOptions) -> Iterator[tuple[Decoder, Weights]]:
    """The model alone, and its weights, from which more may be loaded before the block ends."""
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    hashed, copied = (
        ByteCount(Path(folder).name, stage, checkpoint.tensors.values(), options.on_progress)
        for stage in LoadStage
    )
    # Options that do not suit the folder are refused here, before a byte of its weights is read.
    weights = options.weights(checkpoint, copied.on_read)
    fingerprint = fingerprint_of(config, checkpoint, options.dtype, weights.format, hashed.on_read)
    ranks = options.group.num_ranks
    manifest = state_manifest(
        config, options.dtype, options.page_size, fingerprint, ranks, options.kv_dtype
    )
    model = family_of(folder).load(config, manifest, weights)
    if weights.lora is not None:
        model = replace(model, lora=weights.lora.served())
    yield model, weights
    checkpoint.check_unchanged()  # the fingerprint is of what was loaded
    copied.finish()


def load_drafted(
    folder: Path | str, draft_folder: Path | str, options: LoadOptions
) -> DraftedModel:
    """The model in `folder` with the one in `draft_folder` as its draft; both as `load_model`."""
    target, draft = (load_model(path, options) for path in (folder, draft_folder))
    return join_draft(target, draft, options)


def load_self_drafting(folder: Path | str, options: LoadOptions) -> SelfDraftingModel:
    """The model in `folder` with its own layer for multi-token prediction as its draft.

    Raises ConfigError as `load_model`, and when config or tensors have no such layer.
    """
    config = mtp_config(folder)
    with _loaded(folder, options) as (target, weights):
        head = load_mtp_head(folder, weights, target.manifest.scan_chunk)
    return join_mtp(target, head, config, options)
