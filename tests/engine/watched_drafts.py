"""Watches what a model's own drafting layer proposes, and has some of its drafts be right.

A random layer is nearly always wrong. So that runs of every length are accepted, a part of the
drafts is replaced by the tokens that plain decoding draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from tests.model.mtp_checkpoint import MtpFormula

from ferryman.model.drafted import SelfDraftingModel


class WatchedDrafts:
    """While it is installed, records each request's proposals by the position of the token before
    them. Requests are told apart by positions, so no two may decode at the same ones."""

    def __init__(self, patch: pytest.MonkeyPatch, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._sequences: list[tuple[int, list[int]]] = []
        self.seen: list[tuple[list[int], int, list[int]]] = []
        original = SelfDraftingModel.named

        def named(model: SelfDraftingModel, batch: Any, *others: Any) -> Any:
            return self._watch(batch, original(model, batch, *others))

        patch.setattr(SelfDraftingModel, "named", named)

    def expect(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """The prompts that come next, each with the tokens that follow it."""
        self._sequences = [(len(prompt), [*prompt, *drawn]) for prompt, drawn in sequences]
        self.seen.clear()

    def _watch(self, batch: Any, token_ids: Any) -> Any:
        firsts = [0, *accumulate(batch.waves)]
        num_drafting = batch.waves[1] if len(batch.waves) > 1 else 0
        for request in range(num_drafting):
            run = [f + request for f, n in zip(firsts, batch.waves, strict=False) if n > request]
            position = int(batch.positions[run[0]])
            if position < 0:  # pads a step on a card
                continue
            (whole,) = (s for prompt_len, s in self._sequences if prompt_len <= position < len(s))
            assert int(token_ids[run[0]]) == whole[position]
            self.seen.append((whole, position + 1, [int(token_ids[at]) for at in run[1:]]))
            num_right = self._rng.randint(0, len(run) - 1) if self._rng else 0
            for at, right in zip(run[1 : 1 + num_right], whole[position + 1 :], strict=False):
                token_ids[at] = right
        return token_ids

    def check(self, formula: MtpFormula) -> None:
        """All proposals are those of the formula."""
        assert self.seen
        for whole, length, proposed in self.seen:
            assert proposed == formula.drafts(whole, length, len(proposed)), length
