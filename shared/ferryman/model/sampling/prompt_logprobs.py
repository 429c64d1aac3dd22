"""Log probabilities of a prompt's own tokens, each given the tokens before it.

    logprob(i + 1) = log_softmax(head(hidden[i]))[token i + 1]
    rank(i + 1)    = 1 + tokens that are likelier, and those as likely with a lower id

A prefill makes logits of a prompt's last row alone. Logits of all rows would take gigabytes (8,192
rows × 150,000 tokens × 4 bytes), so the head runs over a few rows at a time. vLLM and SGLang do the
same, by chunks of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ferryman.model.sampling.sampler import are_finite, likeliest, log_softmax

SLICE_ROWS = 32


@dataclass(frozen=True, slots=True)
class PrefilledRows:
    """The hidden states of a prefill's tokens [tokens, hidden_dim], and the `head` that makes
    logits [rows, vocab] of some of them."""

    hidden: Tensor
    head: Callable[[Tensor], Tensor]

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        return self.head(self.hidden[rows])


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The tokens [scored] whose log probabilities are asked for; `rows` [scored] are the tokens of
    the batch before them. `num_best` alternatives are named with each."""

    rows: Tensor
    token_ids: Tensor
    num_best: int

    def slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their tokens, a few at a time."""
        for at in range(0, len(self.rows), SLICE_ROWS):
            yield self.rows[at : at + SLICE_ROWS], self.token_ids[at : at + SLICE_ROWS]


def prompt_logprobs(prefilled: PrefilledRows, scored: ScoredRows) -> tuple[Tensor, ...]:
    """Values [scored, 1 + best], NaN if logits are not all finite; the token ids that they
    belong to, the prompt's own first; and the ranks [scored] of those."""
    parts = [
        _scores(prefilled.logits(rows), token_ids, scored.num_best)
        for rows, token_ids in scored.slices()
    ]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def head_alone(prefilled: PrefilledRows, scored: ScoredRows) -> tuple[Tensor, ...]:
    """This rank's part of the same logits. The ranks exchange them slice by slice, so every rank
    runs as many."""
    for rows, _ in scored.slices():
        prefilled.logits(rows)
    return ()


def _scores(logits: Tensor, token_ids: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    logs = log_softmax(logits)
    prompt_logs = logs.gather(1, token_ids[:, None])
    ids = torch.arange(logs.shape[1], device=logs.device)
    is_before = (logs > prompt_logs) | ((logs == prompt_logs) & (ids < token_ids[:, None]))
    named = likeliest(logs, token_ids, num_best)
    values = torch.where(are_finite(logits)[:, None], logs.gather(1, named), torch.nan)
    return values, named, 1 + is_before.sum(dim=1)
