"""A model that drafts with its own layer for multi-token prediction: one state, two forwards.

    prefill    the model over the chunk; the layer's entries from its hidden states, one behind
    a step     the layer: the known token → draft 1 → draft 2 → …      with its own y for hidden
               the model: the known token and all drafts at once
               the layer's entries again, from the model's hidden states

So the entries that stay depend on tokens alone, not on which of them were drafts. The layer's keys
and values lie in the full kind's pages. The hidden state of the last token is part of a recurrent
slot: where a request goes on, resumes or is handed to, the state it needs is there, exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.model.config import family_of, load_config
from ferryman.model.drafted import DraftedConfig, one_wave, wave_spans
from ferryman.model.families import FAMILIES
from ferryman.model.family import MtpSource
from ferryman.model.fingerprint import FINGERPRINT_BYTES
from ferryman.model.layers.decoder import Decoder
from ferryman.model.layers.decoder_layers import LayerPlace
from ferryman.model.layers.mtp import HiddenShape, MtpHead
from ferryman.model.load_options import LoadOptions
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.sampling.sampler import greedy
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.config_fields import read_fields
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman.model.weights.named_weights import Weights
from ferryman_kernels.attention.latent_pages import write_latents


@dataclass(frozen=True, slots=True)
class SelfDraftingModel:
    """`target` decides the tokens; `head` proposes them, and has its state at layer
    `state_layer`."""

    target: Decoder
    head: MtpHead
    config: ModelConfig
    manifest: StateManifest

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def state_layer(self) -> int:
        return len(self.target.config.states)

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor:
        return self.prefill_rows(batch, state).logits(batch.last_tokens)

    @torch.inference_mode()
    def prefill_rows(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        ends, kept = self.target.ends, state.hidden[self.state_layer]
        hidden = ends.norm(self.target.hidden_states(batch, state))
        firsts = [0, *accumulate(end - start for start, end in batch.spans)]
        before = hidden.roll(1, dims=0)
        before[firsts[:-1]] = kept[batch.working_slots]
        self.head.write(ends.embed(batch.token_ids), before, batch, state)
        _keep_hidden(kept, hidden, batch, firsts)
        return PrefilledRows(hidden, ends.logits_of_normed)

    @torch.inference_mode()
    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        ends, kept = self.target.ends, state.hidden[self.state_layer]
        hidden = ends.norm(self.target.hidden_states(batch, state))
        # A first wave reads and writes the same slots, so what they held is taken first.
        before = torch.cat(
            [
                _held(kept, batch.read_slots[: batch.waves[0]]),
                *(
                    _followed(hidden, wave, next_wave)
                    for wave, next_wave in wave_spans(batch.waves)
                ),
            ]
        )
        _keep(kept, batch.write_slots, hidden)
        self.head.write(ends.embed(batch.token_ids), before, batch, state)
        return ends.logits_of_normed(hidden)

    @torch.inference_mode()
    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        """The batch's token ids [tokens]; the head proposes all but those of the first wave.

        Rank 0 of `group` proposes for all ranks. `decode` overwrites all entries that it leaves.
        """
        ends, token_ids = self.target.ends, batch.token_ids.clone()
        kept = state.hidden[self.state_layer]
        before = _held(kept, batch.read_slots[: batch.waves[0]])
        for wave, next_wave in wave_spans(batch.waves):
            asked = _followed_span(wave, next_wave)
            if asked.start == asked.stop:
                break
            part = one_wave(batch, token_ids, asked)
            before = before[: asked.stop - asked.start]
            before = self.head.propose(ends.embed(part.token_ids), before, part, state)
            drafts = greedy(ends.logits_of_normed(before))
            token_ids[next_wave] = group.from_first(drafts)
        return token_ids


def _held(kept: Tensor, slots: Tensor) -> Tensor:
    """The rows of `kept` at `slots` [tokens]; zeros for a negative slot."""
    return kept[slots.clamp_min(0)].masked_fill_((slots < 0)[:, None], 0.0)


def _keep(kept: Tensor, slots: Tensor, hidden: Tensor) -> None:
    """Writes `hidden` [tokens, hidden_dim] at `slots`; nothing for a negative slot."""
    rows = torch.arange(len(slots), device=slots.device)
    write_latents(kept[:, None], hidden, slots[:, None], rows, torch.zeros_like(rows))


def _followed_span(wave: slice, next_wave: slice) -> slice:
    """The tokens of `wave` whose requests have a token in the next wave, `next_wave`, too."""
    return slice(wave.start, wave.start + next_wave.stop - next_wave.start)


def _followed(hidden: Tensor, wave: slice, next_wave: slice) -> Tensor:
    return hidden[_followed_span(wave, next_wave)]


def _keep_hidden(kept: Tensor, hidden: Tensor, batch: PrefillBatch, firsts: Sequence[int]) -> None:
    """Writes the hidden states at the ends of all chunks, and those of the snapshots."""
    kept[batch.working_slots] = hidden[[end - 1 for end in firsts[1:]]]
    if batch.snapshots:
        rows = [firsts[i] + at - batch.spans[i][0] - 1 for i, at, _ in batch.snapshots]
        kept[[slot for _, _, slot in batch.snapshots]] = hidden[rows]


def mtp_source(folder: Path | str) -> MtpSource[Any]:
    """The description of the model's layer for multi-token prediction.

    Raises ConfigError, by field or architecture, when it has none that is supported.
    """
    fields, source = read_fields(Path(folder) / "config.json"), family_of(folder).mtp
    if source is None:
        supported = [name for family in FAMILIES if family.mtp for name in family.architectures]
        raise ConfigError(
            f"{fields.source}: --draft mtp needs a model with a layer for multi-token prediction; "
            f"supported are {', '.join(supported)}"
        )
    source.check(fields)
    return source


def mtp_config(folder: Path | str) -> DraftedConfig:
    """The config of the model in `folder` with the state of its drafting layer. Raises as
    `mtp_source` does."""
    target: ModelConfig = load_config(folder)
    drafts = (mtp_source(folder).attention(target), HiddenShape(target.trunk.hidden_dim))
    return DraftedConfig(target.trunk, (*target.states, drafts))


def load_mtp_head(folder: Path | str, weights: Weights, scan_chunk: int) -> MtpHead:
    """The drafting layer of the model in `folder`. Raises ConfigError, by name, for tensors that
    are missing, and as `mtp_source` does."""
    target: ModelConfig = load_config(folder)
    trunk = target.trunk
    place = LayerPlace(len(target.states), trunk.hidden_dim, trunk.norm_eps, scan_chunk)
    head: MtpHead = mtp_source(folder).load(target, weights, place)
    return head


def join_mtp(
    target: Decoder, head: MtpHead, config: DraftedConfig, options: LoadOptions
) -> SelfDraftingModel:
    """One model of both; `config` is that of `mtp_config`."""
    named = f"{target.manifest.fingerprint} drafted by its own layer"
    fingerprint = hashlib.blake2b(named.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()
    manifest = state_manifest(
        config,
        options.dtype,
        target.manifest.page_size,
        fingerprint,
        options.group.num_ranks,
        options.kv_dtype,
    )
    return SelfDraftingModel(target, head, config, manifest)
