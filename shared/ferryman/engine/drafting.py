"""Who drafts for a worker, by the words of its settings: nobody, the text itself, or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ferryman.engine.step import AS_PLANNED, Drafter
from ferryman.errors import ConfigError
from ferryman.model.decoder import Model
from ferryman.model.ranks import Group
from ferryman.model.registry import load_drafted, load_model
from ferryman.schedule.drafting import NO_DRAFTS, Drafting, ModelDrafts
from ferryman.schedule.prompt_lookup import NGRAM, PromptLookup

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """`by` is empty for plain decoding, NGRAM to draft from a request's own text, or the folder of
    a draft model. A step verifies up to `num_tokens` drafts of each request.

    With 0 a draft model's state is kept all the same, for a worker that prefills for others.
    """

    by: str = ""
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"draft_tokens={self.num_tokens} must lie between 0 and {MAX_DRAFT_TOKENS}"
            )

    @property
    def drafting(self) -> Drafting:
        if not self.by or not self.num_tokens:
            return NO_DRAFTS
        return PromptLookup(self.num_tokens) if self.by == NGRAM else ModelDrafts(self.num_tokens)

    @property
    def model(self) -> str:
        """The folder of the draft model; empty without one."""
        return "" if self.by == NGRAM else self.by


PLAIN = DraftOptions()


def load_with_draft(
    folder: Path | str,
    draft_folder: str,
    dtype: str,
    *,
    device: torch.device | str,
    page_size: int,
    group: Group,
) -> tuple[Model, Drafter]:
    """The model to serve, joined with a draft model if there is one, and what names its drafts."""
    if not draft_folder:
        model = load_model(folder, dtype, device=device, page_size=page_size, group=group)
        return model, AS_PLANNED
    drafted = load_drafted(
        folder, draft_folder, dtype, device=device, page_size=page_size, group=group
    )
    return drafted, drafted
