"""The kernels that read and advance a model's state, in one of two ways on a card.

On a card the fastest kernels compute a prompt in another order of sums than a single token, and
split what is long by the rows of a step. Where the arithmetic of a state promises bits there
(`StateManifest.is_exact_on_card`), other kernels have one order for both. On a CPU the usual ones
have it, and the two ways are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ferryman_kernels.attention.latent_attention import (
    latent_attention,
    latent_attention_by_splits,
    latent_attention_decode,
    latent_attention_prefill,
    latent_decode_by_splits,
    latent_prefill_by_splits,
)
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
    paged_decode_by_splits,
    paged_prefill_by_splits,
)
from ferryman_kernels.attention.sparse_index import (
    choose_decode,
    choose_prefill,
    choose_prefill_by_token,
)
from ferryman_kernels.recurrence.delta_chunk_scan import delta_chunk_scan
from ferryman_kernels.recurrence.delta_step import delta_step
from ferryman_kernels.recurrence.mamba_step import mamba_step
from ferryman_kernels.recurrence.ssd_chunk_scan import chunk_scan
from ferryman_kernels.recurrence.ssd_decode import selective_state_update
from ferryman_kernels.recurrence.token_scans import (
    chunk_scan_by_token,
    delta_scan_by_token,
    delta_step_by_token,
    mamba_step_by_token,
    state_update_by_token,
)

Launcher = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class StateKernels:
    """Launchers by what they do; each has the arguments of the first one that `fastest` names.

    Convolutions and the scans of Mamba-1 and Kimi Delta are not here: they have one order
    everywhere, by one kernel for prompts and single tokens or by two with the same bits.
    """

    paged_prefill: Launcher
    paged_decode: Launcher
    latent_prefill: Launcher
    latent_decode: Launcher
    latent_places: Launcher
    choose_prefill: Launcher
    choose_decode: Launcher
    scan: Launcher
    update: Launcher
    mamba_step: Launcher
    delta_scan: Launcher
    delta_step: Launcher


def fastest() -> StateKernels:
    return StateKernels(
        paged_prefill=paged_attention_prefill,
        paged_decode=paged_attention_decode,
        latent_prefill=latent_attention_prefill,
        latent_decode=latent_attention_decode,
        latent_places=latent_attention,
        choose_prefill=choose_prefill,
        choose_decode=choose_decode,
        scan=chunk_scan,
        update=selective_state_update,
        mamba_step=mamba_step,
        delta_scan=delta_chunk_scan,
        delta_step=delta_step,
    )


def scanned_by_token(kernels: StateKernels) -> StateKernels:
    """The same, but for scans in blocks: those lie on a grid of positions, so their launches follow
    from where a span begins, and a padded span's may not."""
    return replace(kernels, scan=chunk_scan_by_token, delta_scan=delta_scan_by_token)


def in_one_order() -> StateKernels:
    return StateKernels(
        paged_prefill=paged_prefill_by_splits,
        paged_decode=paged_decode_by_splits,
        latent_prefill=latent_prefill_by_splits,
        latent_decode=latent_decode_by_splits,
        latent_places=latent_attention_by_splits,
        choose_prefill=choose_prefill_by_token,
        choose_decode=choose_decode,
        scan=chunk_scan_by_token,
        update=state_update_by_token,
        mamba_step=mamba_step_by_token,
        delta_scan=delta_scan_by_token,
        delta_step=delta_step_by_token,
    )
