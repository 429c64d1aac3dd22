"""One loaded tokenizer of each kind, made once."""

from __future__ import annotations

import pytest
from tests.text.folders import KINDS, write_folder

from ferryman.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=list(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp(str(request.param))
    return Tokenizer.load(write_folder(folder, request.param))
