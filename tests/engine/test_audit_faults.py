"""The audit finds each fault of reuse that is planted in an engine, and none in a sound one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.engine.audit_faults import FAULTS, ReuseFault, Strikes
from tests.engine.audited_engine import AuditedEngine, MixedTraffic, audited
from tests.model.comparison import random_config
from tests.tiny_models import save_random, save_tiny_model

from ferryman.schedule.events import AuditResult
from ferryman_kernels.products.packed_product import reads_panels

pytestmark = pytest.mark.skipif(
    not reads_panels(torch.bfloat16), reason="this processor's products follow the batch"
)
SEED = 5
MODELS = ("lfm2", "gemma3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


def save_model(folder: Path, name: str) -> Path:
    if name == "gemma3":
        return save_tiny_model(folder, name)
    return save_random(folder, random_config(name, 0), seed=1)


@contextmanager
def engine_with(folder: Path, fault: ReuseFault, share: float = 1.0) -> Iterator[AuditedEngine]:
    """bfloat16: there short convolutions have equal bits, too."""
    with audited(folder, "bfloat16", share, draft=fault.draft) as engine:
        yield engine


@pytest.mark.parametrize("name", FAULTS)
def test_it_finds_a_fault_that_is_planted(name: str, folders: dict[str, Path]) -> None:
    fault, strikes = FAULTS[name], Strikes()
    with engine_with(folders[fault.model], fault) as engine:
        fault.plant(engine, strikes)
        traffic = MixedTraffic(engine, SEED)
        while not engine.audits.differences and traffic.num_requests < 60:
            traffic.ask(1)
    assert strikes.number, "the fault was planted"
    assert engine.audits.differences


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("draft", ["", "ngram"])
def test_it_finds_nothing_where_all_is_sound(
    model: str, draft: str, folders: dict[str, Path]
) -> None:
    with audited(folders[model], "bfloat16", draft=draft) as engine:
        MixedTraffic(engine, SEED).ask(40)
        engine.check_integrity()
    assert not engine.audits.differences
    assert engine.audits.results[AuditResult.EQUAL] >= 15
    assert {"device", "host", "retraction"} <= engine.audits.reuse.keys()
