"""Rows of token ids for training, with the positions whose next token counts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from tools.demo.conversations import conversation
from tools.demo.stories import Message
from tools.demo.vocabulary import END, ROLES, token_id
from torch import Tensor

ANSWERING = ("assistant", "answer")


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of rows: `token_ids` [rows, length + 1]; `counts` [rows, length] of the next ones."""

    token_ids: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class LabelledTokens:
    """Token ids, and which of them are learned."""

    token_ids: list[int]
    learned: list[bool]


def labelled(tokenizer: Tokenizer, messages: list[Message]) -> LabelledTokens:
    """The messages as the chat template writes them; answers and their end are learned."""
    end = token_id(tokenizer, END)
    texts = tokenizer.encode_batch_fast([m.text for m in messages], add_special_tokens=False)
    token_ids: list[int] = []
    learned: list[bool] = []
    for message, text in zip(messages, texts, strict=True):
        role = ROLES.get(message.role)
        head = [token_id(tokenizer, role)] if role else []
        tail = [] if message.role == "plain" else [end]
        token_ids += head + text.ids + tail
        answer = message.role in ANSWERING
        learned += [False] * len(head) + [answer] * (len(text.ids) + len(tail))
    return LabelledTokens(token_ids, learned)


def training_batch(
    tokenizer: Tokenizer, rng: Random, *, rows: int, length: int, talk_share: float
) -> TrainingBatch:
    """Rows cut to `length` tokens; a conversation that is too short is followed by another."""
    ids = np.empty((rows, length + 1), dtype=np.int64)
    counts = np.empty((rows, length + 1), dtype=bool)
    for row in range(rows):
        whole = LabelledTokens([], [])
        while len(whole.token_ids) <= length:
            part = labelled(tokenizer, conversation(rng, length, talk_share=talk_share))
            whole = LabelledTokens(whole.token_ids + part.token_ids, whole.learned + part.learned)
        ids[row] = whole.token_ids[: length + 1]
        counts[row] = whole.learned[: length + 1]
    return TrainingBatch(torch.from_numpy(ids), torch.from_numpy(counts[:, 1:]))
