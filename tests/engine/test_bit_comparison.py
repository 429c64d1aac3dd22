"""An audit is refused where equal tokens may have other bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.pair import worker_options
from tests.tiny_models import save_tiny_model

from ferryman.engine import bit_comparison
from ferryman.engine.bit_comparison import why_not_bits
from ferryman.engine.engine import build_engine
from ferryman.errors import ConfigError
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.settings.engine import EngineOptions


@pytest.fixture(scope="module", params=["gemma3", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def reason(folder: Path, **others: Any) -> str:
    options = worker_options(folder).model_copy(update={"dtype": "bfloat16", **others})
    return why_not_bits(options, load_model(folder, LoadOptions("bfloat16", page_size=16)).manifest)


def test_the_reason_names_what_follows_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_comparison, "reads_panels", lambda _dtype: True)
    is_recurrent = folder.name.startswith("bamba")
    assert ("recurrent layers" in reason(folder)) is is_recurrent
    assert "float64" in reason(folder, dtype="float64")
    assert "card" in reason(folder, device="cuda")
    monkeypatch.setattr(bit_comparison, "reads_panels", lambda _dtype: False)
    assert "AVX-512" in reason(folder)


def test_a_worker_without_bits_does_not_start_with_an_audit(folder: Path) -> None:
    options: EngineOptions = worker_options(folder, audit_share=0.01)
    with pytest.raises(ConfigError, match=r"audit_share=0\.01: float64 is exact to 1e-14"):
        with build_engine(options):
            pass
