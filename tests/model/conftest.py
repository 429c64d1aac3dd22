"""Tiny models, their oracles, and the oracle's answers, each made once a session."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.oracle import TransformersOracle, load_oracle
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from torch import Tensor

from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model

NUM_PROMPTS = 8
PROMPT_LEN = 300

FolderOf = Callable[[str], Path]
ModelOf = Callable[[str, str, int], Model]
AnswerOf = Callable[[str, int], Tensor]


def prompt(index: int) -> list[int]:
    """The token ids of prompt `index`; tests use prefixes of it."""
    rng = random.Random(index)
    return [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of the tiny model with this name."""

    @cache
    def folder(variant: str) -> Path:
        return save_tiny_model(tmp_path_factory.mktemp(variant), variant)

    return folder


@pytest.fixture(scope="session")
def model_of(folder_of: FolderOf) -> ModelOf:
    """The model (variant, dtype, page size)."""

    @cache
    def model(variant: str, dtype: str, page_size: int) -> Model:
        return load_model(folder_of(variant), LoadOptions(dtype, page_size=page_size))

    return model


@pytest.fixture(scope="session")
def answer_of(folder_of: FolderOf) -> AnswerOf:
    """The float64 oracle's logits [PROMPT_LEN, vocab] for (variant, prompt index)."""

    @cache
    def oracle(variant: str) -> TransformersOracle:
        return load_oracle(folder_of(variant), torch.float64)

    @cache
    def answer(variant: str, index: int) -> Tensor:
        return oracle(variant).logits(prompt(index))

    return answer
