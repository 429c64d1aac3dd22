"""The steps of a lone request at the start of an engine: as many as make its recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.pair import worker_options
from tests.native import native_config, save_native

from ferryman.cache.manifest import StateManifest
from ferryman.engine.engine import build_engine
from ferryman.engine.forward.replayed_forward import FIRST_AFTER
from ferryman.engine.stream import LaunchedStep, StepEngine
from ferryman.engine.warm_up import MostTokens, warm_up
from ferryman.schedule.batch import DecodeStep, StepPlan
from ferryman.schedule.step_sizes import StepSizes

OWN_DRAFTS = "the model drafts for itself"


class LoneSteps:
    """Warms an engine up, and counts the decode steps of one request."""

    def __init__(self) -> None:
        self.count = 0
        self._engine: StepEngine | None = None

    def warm(
        self, engine: StepEngine, manifest: StateManifest, sizes: StepSizes | None, most: MostTokens
    ) -> None:
        self._engine = engine
        warm_up(self, manifest, sizes, most)

    def begin(self, plan: StepPlan) -> None:
        """The steps of a warm-up load nothing."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert self._engine is not None
        self.count += isinstance(plan, DecodeStep) and len(plan.request_ids) == 1
        return self._engine.launch(plan)


@pytest.mark.parametrize(
    ("chosen", "num_steps"),
    [
        pytest.param({}, 1 + FIRST_AFTER, id="recorded"),
        pytest.param({"draft": "ngram"}, 1 + FIRST_AFTER, id="drafts-from-the-text"),
        pytest.param({"replay_steps": False}, 1, id="launched"),
        pytest.param({"decodes": False}, 1, id="prefill"),
        pytest.param({"draft": OWN_DRAFTS}, 1, id="drafter"),
        pytest.param({"tp_size": 2}, 1, id="ranks"),
    ],
)
def test_they_run_where_steps_are_recorded(
    tmp_path: Path, chosen: dict[str, Any], num_steps: int
) -> None:
    folder, steps = save_native(tmp_path, native_config()), LoneSteps()
    if chosen.get("draft") == OWN_DRAFTS:
        chosen = {"draft": str(folder)}
    with build_engine(worker_options(folder, **chosen), warm=steps.warm):
        assert steps.count == num_steps
