"""After each test the launcher and the commands hold nothing that they took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.ledger import launcher_holds_nothing


@pytest.fixture(autouse=True)
def _launcher_holds_nothing_at_the_end(tmp_path: Path) -> Iterator[None]:
    with launcher_holds_nothing(tmp_path):
        yield
