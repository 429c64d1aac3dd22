"""A model with a draft model: one state, two forwards.

The draft's layers are numbered after the target's, and their sections are in the same page slots
and recurrent slots. So prefix cache, tiers, hand-off and retraction carry the draft's state without
knowing of it.

    prefill    draft, then target, over the same chunk
    a step     draft: the known token → draft 1 → draft 2 → … → consumes the last draft, too
               target: the known token and all drafts at once

The draft model consumes its last proposal too, so the state after every draft is complete: both
models go on from the same slot, no matter how many drafts the target accepts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.model.fingerprint import FINGERPRINT_BYTES
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.sampling.sampler import greedy
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.model_shapes import ModelConfig, StateShape, TrunkShape
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState


@dataclass(frozen=True, slots=True)
class DraftedConfig:
    """The target's config, with the state of both."""

    trunk: TrunkShape
    states: tuple[tuple[StateShape, ...], ...]


@dataclass(frozen=True, slots=True)
class DraftedModel:
    """`target` decides the tokens; `draft` has the same vocabulary and proposes them."""

    target: Model
    draft: Model
    config: ModelConfig
    manifest: StateManifest

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def device(self) -> torch.device:
        return self.target.device

    def prefill(self, batch: PrefillBatch, state: ModelState) -> Tensor:
        return self.prefill_rows(batch, state).logits(batch.last_tokens)

    def prefill_rows(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        self.draft.prefill(batch, self._drafts_state(state))
        return self.target.prefill_rows(batch, state)

    def decode(self, batch: DecodeBatch, state: ModelState) -> Tensor:
        """The target's forward alone; `named` has already advanced the draft's state."""
        return self.target.decode(batch, state)

    @torch.inference_mode()
    def named(self, batch: DecodeBatch, state: ModelState, group: Group) -> Tensor:
        """The batch's token ids [tokens]; the draft model proposes all but those of the first wave.

        Rank 0 of `group` proposes for all ranks. The draft's state advances over all tokens.
        """
        token_ids, drafts_state = batch.token_ids.clone(), self._drafts_state(state)
        for wave, next_wave in wave_spans(batch.waves):
            logits = self.draft.decode(one_wave(batch, token_ids, wave), drafts_state)
            following = next_wave.stop - next_wave.start
            if following:
                token_ids[next_wave] = group.from_first(greedy(logits[:following]))
        return token_ids

    def _drafts_state(self, state: ModelState) -> ModelState:
        return state.from_layer(len(self.target.config.states))


def wave_spans(sizes: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Each wave's tokens with those of the next wave, which is empty after the last."""
    ends = [0, *accumulate(sizes)]
    spans = [slice(*span) for span in pairwise(ends)]
    return zip(spans, [*spans[1:], slice(ends[-1], ends[-1])], strict=True)


def one_wave(batch: DecodeBatch, token_ids: Tensor, wave: slice) -> DecodeBatch:
    """The tokens of `wave`, or of a part of it, as a batch of their own."""
    return DecodeBatch(
        token_ids=token_ids[wave],
        positions=batch.positions[wave],
        page_tables={kind: table[wave] for kind, table in batch.page_tables.items()},
        read_slots=batch.read_slots[wave],
        write_slots=batch.write_slots[wave],
        waves=(wave.stop - wave.start,),
    )


def join_configs(target: ModelConfig, draft: ModelConfig) -> DraftedConfig:
    """The config of both. Raises ConfigError, with the difference, if they cannot go together.

    The context is as long as the shorter of the two.
    """
    ours, theirs = target.trunk, draft.trunk
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {theirs.vocab_size} tokens, the model one of "
            f"{ours.vocab_size}: its drafts would mean other words"
        )
    shorter = min(ours.max_positions, theirs.max_positions)
    return DraftedConfig(replace(ours, max_positions=shorter), target.states + draft.states)


def join_draft(target: Model, draft: Model, options: LoadOptions) -> DraftedModel:
    """One model of both. Raises ConfigError as `join_configs`."""
    config = join_configs(target.config, draft.config)
    page_size, fingerprint = target.manifest.page_size, _joint_fingerprint(target, draft)
    manifest = state_manifest(
        config,
        options.dtype,
        page_size,
        fingerprint,
        options.group.num_ranks,
        options.kv_dtype,
    )
    return DraftedModel(target, draft, config, manifest)


def _joint_fingerprint(target: Model, draft: Model) -> str:
    both = f"{target.manifest.fingerprint} drafted by {draft.manifest.fingerprint}"
    return hashlib.blake2b(both.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()
