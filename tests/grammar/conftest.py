"""One tokenizer that writes any text, and the compiler of its grammars."""

from __future__ import annotations

import pytest
from tests.text.folders import write_folder

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler.for_tokenizer(tokenizer, tokenizer.vocab_size)
