"""Loads a model from its folder: alone, with a draft model, or drafting for itself.

Equal fingerprints mean equal models, number for number:

    fingerprint = blake2b(config as read ‖ dtype ‖ format of the weights
                          ‖ name, dtype, shape and xxh3_128 of every tensor)
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import xxhash

from ferryman.cache.manifest import StateManifest
from ferryman.model.config import family_of, load_config, mtp_config, mtp_source
from ferryman.model.drafted import DraftedConfig, DraftedModel, SelfDraftingModel, join_configs
from ferryman.model.layers.decoder import Decoder, Model
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.mtp import MtpHead
from ferryman.model.load_options import LoadOptions
from ferryman.model.one_order import in_one_order
from ferryman.model.shapes.manifest import check_kv_dtype, scan_block, state_manifest
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.weights.checkpoint import Checkpoint
from ferryman.model.weights.gguf_checkpoint import open_model
from ferryman.model.weights.load_progress import ByteCount, LoadStage
from ferryman.model.weights.named_weights import OnRead, WeightFormat, Weights, uncounted
from ferryman.model.weights.safetensors_header import StoredTensor
from ferryman.model.weights.weight_formats import AS_STORED
from ferryman_kernels.cpu.huge_pages import regions_of_one_model

FINGERPRINT_BYTES = 16


def load_model(folder: Path | str, options: LoadOptions) -> Decoder:
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
    checkpoint = open_model(folder)
    hashed, copied = (
        ByteCount(Path(folder).name, stage, checkpoint.places, options.on_progress)
        for stage in LoadStage
    )
    # Options that do not suit the folder are refused here, before a byte of its weights is read.
    weights = options.weights(checkpoint, copied.on_read)
    fingerprint = fingerprint_of(config, checkpoint, options.dtype, weights.format, hashed.on_read)
    with regions_of_one_model():
        model = family_of(folder).load(config, _manifest(config, fingerprint, options), weights)
        if weights.lora is not None:
            model = replace(model, lora=weights.lora.served())
        if model.manifest.is_exact_on_card:
            model = in_one_order(model)
        yield model, weights
    checkpoint.check_unchanged()  # the fingerprint is of what was loaded
    copied.finish()


def load_drafted(
    folder: Path | str, draft_folder: Path | str, options: LoadOptions
) -> DraftedModel:
    """The model in `folder` with the one in `draft_folder` as its draft; both as `load_model`.

    Raises ConfigError as `join_configs`, too.
    """
    target, draft = (load_model(path, options) for path in (folder, draft_folder))
    config = join_configs(target.config, draft.config)
    manifest = _joint_manifest(config, target, draft.manifest.fingerprint, options)
    return DraftedModel(target, draft, config, manifest)


def load_self_drafting(folder: Path | str, options: LoadOptions) -> SelfDraftingModel:
    """The model in `folder` with its own layer for multi-token prediction as its draft.

    Raises ConfigError as `load_model`, and when config or tensors have no such layer.
    """
    config = mtp_config(folder)
    with _loaded(folder, options) as (target, weights):
        head = load_mtp_head(folder, weights, scan_block(target.manifest))
    manifest = _joint_manifest(config, target, "its own layer", options)
    if manifest.is_exact_on_card:
        head = in_one_order(head)
    return SelfDraftingModel(target, head, config, manifest)


def load_mtp_head(folder: Path | str, weights: Weights, block: int) -> MtpHead:
    """The drafting layer of the model in `folder`. Raises ConfigError, by name, for tensors that
    are missing, and as `mtp_source` does."""
    target: ModelConfig = load_config(folder)
    trunk = target.trunk
    place = LayerPlace(len(target.states), trunk.hidden_dim, trunk.norm_eps, block)
    head: MtpHead = mtp_source(folder).load(target, weights, place)
    return head


def _joint_manifest(
    config: DraftedConfig, target: Model, drafted_by: str, options: LoadOptions
) -> StateManifest:
    named = f"{target.manifest.fingerprint} drafted by {drafted_by}"
    fingerprint = hashlib.blake2b(named.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()
    return _manifest(config, fingerprint, options)


def _manifest(config: ModelConfig, fingerprint: str, options: LoadOptions) -> StateManifest:
    on_card = str(options.device).startswith("cuda")
    check_kv_dtype(config, options.kv_dtype, on_card=on_card)
    return state_manifest(
        config,
        options.dtype,
        options.page_size,
        fingerprint,
        options.group.num_ranks,
        options.kv_dtype,
        options.arithmetic,
    )


def model_fingerprint(folder: Path | str, dtype: str, quantize: str = AS_STORED) -> str:
    """32 hex digits that name the model in `folder` run in `dtype` on a processor. Reads every byte
    of it once."""
    config = load_config(folder)
    weight_format = LoadOptions(dtype, quantize=quantize).format_of(folder)
    return fingerprint_of(config, open_model(folder), dtype, weight_format)


def fingerprint_of(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: str,
    weight_format: WeightFormat,
    on_read: OnRead = uncounted,
) -> str:
    """The `model_fingerprint` of a checkpoint that is open."""
    tensors = sorted(checkpoint.places, key=lambda tensor: (tensor.file, tensor.start))
    lines = sorted(
        line
        for file, stored in groupby(tensors, lambda tensor: tensor.file)
        for line in _lines(checkpoint.files[file].content, stored, on_read)
    )
    head = json.dumps([repr(config), dtype, repr(weight_format)])
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    digest.update("\n".join([head, *lines]).encode())
    return digest.hexdigest()


def _lines(content: mmap.mmap, tensors: Iterable[StoredTensor], on_read: OnRead) -> list[str]:
    """One line a tensor, so that the division of the bytes into files makes no difference."""
    # In the order of the bytes the kernel can read ahead; loaders that follow find them in memory.
    content.madvise(mmap.MADV_SEQUENTIAL)
    with memoryview(content) as view:
        lines = [_line(tensor, view, on_read) for tensor in tensors]
    content.madvise(mmap.MADV_NORMAL)
    return lines


def _line(tensor: StoredTensor, content: memoryview, on_read: OnRead) -> str:
    on_read(tensor)
    with content[tensor.start : tensor.end] as part:
        digest = xxhash.xxh3_128_hexdigest(part)
    return json.dumps([tensor.name, tensor.dtype, tensor.shape, digest])
