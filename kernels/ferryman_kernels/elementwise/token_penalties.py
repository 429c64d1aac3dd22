"""Penalties on earlier tokens, on a card: two launches and cleared memory between logits and draw.

`sampler.py` has the formula, and computes it in the same way by torch's operations on a CPU. Here
earlier tokens are counted by atomic operations on integers, whose order changes nothing; then each
logit is computed by itself. Products are rounded before they are subtracted, as torch rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman_kernels._precision import wide_dtype
from ferryman_kernels._triton import Kernel, cdiv, tl, wide_type, with_whole_rows

BLOCK = 1024
"""Earlier tokens, or logits, of one program."""


@dataclass(frozen=True, slots=True)
class EarlierTokens:
    """The tokens before each draw: `token_ids` [draws, longest]. Row i holds the prompt in [0,
    prompt_lens[i]) and the output in [prompt_lens[i], lens[i])."""

    token_ids: Tensor
    prompt_lens: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyStrengths:
    """The strengths of the penalties on earlier tokens, all [draws]."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@Kernel
def _count_tokens_kernel(
    ids_ptr: tl.tensor,
    prompt_lens_ptr: tl.tensor,
    lens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    longest: int,
    vocab: int,
    BLOCK: tl.constexpr,
) -> None:
    """Some places of one row: bit 0 of a token's count says that it occurs, the bits above how
    often it does in the output."""
    draw = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_past = place < tl.minimum(tl.load(lens_ptr + draw), longest)
    is_output = is_past & (place >= tl.load(prompt_lens_ptr + draw))
    token = tl.load(ids_ptr + draw * longest + place, mask=is_past, other=0).to(tl.int64)
    is_past = is_past & (token < vocab)
    count = counts_ptr + draw * vocab + tl.maximum(token, 0)
    tl.atomic_or(count, 1, mask=is_past)
    tl.atomic_add(count, 2, mask=is_past & is_output)


@Kernel
def _penalise_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    penalised_ptr: tl.tensor,
    stride: int,
    vocab: int,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Some logits of one row."""
    draw = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    logits = tl.load(logits_ptr + draw * stride + token, mask=mask, other=0.0).to(WIDE)
    count = tl.load(counts_ptr + draw * vocab + token, mask=mask, other=0)
    # A product of two float32 is whole in float64: it is rounded once, as is a quotient.
    repetition = tl.load(repetition_ptr + draw).to(WIDE).to(tl.float64)
    precise = logits.to(tl.float64)
    repeated = tl.where(logits > 0, precise / repetition, precise * repetition).to(WIDE)
    logits = tl.where(count > 0, repeated, logits)
    outputs = (count >> 1).to(tl.float64)
    by_count = tl.load(frequency_ptr + draw).to(WIDE).to(tl.float64) * outputs
    is_output = tl.where(outputs > 0, 1.0, 0.0)
    by_presence = tl.load(presence_ptr + draw).to(WIDE) * is_output.to(WIDE)
    penalised = logits - by_count.to(WIDE) - by_presence
    tl.store(penalised_ptr + draw * vocab + token, penalised, mask=mask)


def penalise_triton(logits: Tensor, past: EarlierTokens, strengths: PenaltyStrengths) -> Tensor:
    """New logits [draws, vocab], in float32 or the float64 that they have."""
    logits = with_whole_rows(logits)
    (count, vocab), longest = logits.shape, past.token_ids.shape[1]
    ids = past.token_ids.contiguous()
    counts = torch.zeros(count, vocab, dtype=torch.int32, device=logits.device)
    _count_tokens_kernel[count, max(1, cdiv(longest, BLOCK))](
        ids, past.prompt_lens, past.lens, counts, longest, vocab, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    wide = wide_dtype(logits.dtype)
    penalised = torch.empty(count, vocab, dtype=wide, device=logits.device)
    _penalise_kernel[count, cdiv(vocab, BLOCK)](
        logits, counts, strengths.repetition, strengths.presence, strengths.frequency,
        penalised, logits.stride(0), vocab, BLOCK=BLOCK, WIDE=wide_type(logits.dtype), num_warps=4,
    )  # fmt: skip
    return penalised
