"""A model that drafts for itself or has a draft model: one state, two forwards.

A draft model (`DraftedModel`). Its layers are numbered after the target's, and their sections are
in the same page slots and recurrent slots. So prefix cache, tiers, hand-off and retraction carry
the draft's state without knowing of it.

    prefill    draft, then target, over the same chunk
    a step     draft: the known token → draft 1 → draft 2 → … → consumes the last draft, too
               target: the known token and all drafts at once

The draft model consumes its last proposal too, so the state after every draft is complete: both
models go on from the same slot, no matter how many drafts the target accepts.

The model's own layer for multi-token prediction (`SelfDraftingModel`).

    prefill    the model over the chunk; the layer's entries from its hidden states, one behind
    a step     the layer: the known token → draft 1 → draft 2 → …      with its own y for hidden
               the model: the known token and all drafts at once
               the layer's entries again, from the model's hidden states

So the entries that stay depend on tokens alone, not on which of them were drafts. The layer's keys
and values lie in the full kind's pages. The hidden state of the last token is part of a recurrent
slot: where a request goes on, resumes or is handed to, the state it needs is there, exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ferryman.cache.manifest import StateManifest
from ferryman.errors import ConfigError
from ferryman.model.layers.decoder import Decoder, Model
from ferryman.model.layers.mtp import MtpHead
from ferryman.model.sampling.prompt_logprobs import PrefilledRows
from ferryman.model.sampling.sampler import greedy
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.model_shapes import ModelConfig, StateShape, TrunkShape
from ferryman.model.shapes.ranks import Group
from ferryman.model.shapes.state import ModelState
from ferryman_kernels.attention.latent_pages import write_latents
from ferryman_kernels.ragged import on_host


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

    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        self.draft.prefill(batch, self._drafts_state(state))
        return self.target.prefill(batch, state)

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
    def state_layer(self) -> int:
        return len(self.target.config.states)

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch, state: ModelState) -> PrefilledRows:
        ends, kept = self.target.ends, state.hidden[self.state_layer]
        hidden = ends.norm(self.target.hidden_states(batch, state))
        firsts = [0, *accumulate(end - start for start, end in on_host(batch.spans))]
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
        spans = on_host(batch.spans)
        rows = [firsts[i] + at - spans[i][0] - 1 for i, at, _ in batch.snapshots]
        kept[[slot for _, _, slot in batch.snapshots]] = hidden[rows]


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
        rows=batch.rows[: wave.stop - wave.start],
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
