"""Parts of a step that whole models run too, each looked at by itself."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.draw_tensors import pack_draws, unpack_draws
from ferryman.engine.forward.packed_step import StepViews
from ferryman.engine.forward.replayed_forward import (
    MAX_REQUESTS,
    StepShape,
    narrowest_table,
    recorded_shape,
)
from ferryman.engine.tensor_parallel.rank import Command, Inbox
from ferryman.schedule.batch import SampleRequest
from ferryman.schedule.request import SamplingParams

PATIENCE_SECONDS = 120.0


NARROWEST = 48


def _shape(
    waves: tuple[int, ...], adapters: object = (), padding: object = None, pages: int = 1
) -> Any:
    tables = {Kind.FULL: torch.zeros(2, pages), Kind.WINDOW: torch.zeros(2, min(pages, 3))}
    tensors = SimpleNamespace(waves=waves, adapters=adapters, padding=padding, page_tables=tables)
    return recorded_shape(cast(Any, tensors), NARROWEST)


def test_a_step_is_recorded_by_its_requests_and_its_widest_table() -> None:
    for pages, width in ((1, 48), (48, 48), (49, 96), (96, 96), (97, 192), (192, 192), (193, 384)):
        assert _shape((2,), pages=pages) == StepShape(2, width)
    assert _shape((MAX_REQUESTS,), pages=49) == StepShape(MAX_REQUESTS, 96)


@pytest.mark.parametrize(("page_size", "pages"), [(4, 256), (16, 64), (48, 22), (64, 16), (256, 8)])
def test_the_narrowest_table_has_as_many_tokens_whatever_their_pages(
    page_size: int, pages: int
) -> None:
    assert narrowest_table(page_size) == pages


@pytest.mark.parametrize(
    "step",
    [
        {"waves": (MAX_REQUESTS + 1,)},
        {"waves": (1, 1)},
        {"waves": (2,), "adapters": ("an adapter",)},
        {"waves": (2,), "padding": torch.zeros(2)},
    ],
    ids=["more requests", "drafts", "adapters", "padding"],
)
def test_a_step_that_no_recording_can_stand_for_has_no_shape(step: dict[str, Any]) -> None:
    assert _shape(**step) is None


def test_the_filters_of_draws_reach_the_device_each_under_its_name() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=3)
    requests = (SampleRequest(0, 4, 2, params),)
    packed = pack_draws(requests)
    filters = unpack_draws(StepViews(packed, torch.from_numpy(packed.buffer)), requests).filters
    assert filters is not None
    assert (filters.temperatures.tolist(), filters.top_k.tolist()) == ([0.5], [7])
    assert (filters.top_p.tolist(), filters.min_p.tolist()) == ([0.25], [0.125])


@pytest.mark.parametrize(
    ("command", "is_orphan"), [(Command.CLOSE, False), (Command.RUN, True)], ids=["closed", "lost"]
)
def test_a_rank_that_was_told_to_end_is_no_orphan(command: Command, is_orphan: bool) -> None:
    ours, theirs = Pipe()
    orphaned, before = threading.Event(), set(threading.enumerate())
    inbox = Inbox(theirs, orphaned.set)
    (listener,) = set(threading.enumerate()) - before
    ours.send_bytes(np.array([command], np.int64).tobytes())
    assert inbox.next().tolist() == [command]
    ours.close()
    listener.join(PATIENCE_SECONDS)
    assert not listener.is_alive()
    assert orphaned.is_set() is is_orphan
