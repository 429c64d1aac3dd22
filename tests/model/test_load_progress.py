"""A load is reported in bytes of the model's files, which only grow and end at the whole."""

from __future__ import annotations

from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from tests.model.conftest import FolderOf

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_drafted, load_model
from ferryman.model.weights.checkpoint import open_checkpoint
from ferryman.model.weights.load_progress import ByteCount, LoadProgress, LoadStage
from ferryman.model.weights.safetensors_header import StoredTensor


def tensor(name: str, start: int, end: int) -> StoredTensor:
    return StoredTensor(name, Path("file"), "U8", (end - start,), start, end)


@pytest.mark.parametrize("variant", ["granite_moe", "gemma3"])
def test_both_passes_over_a_model_are_reported_to_their_end(
    variant: str, folder_of: FolderOf
) -> None:
    folder = folder_of(variant)
    stored = open_checkpoint(folder).tensors.values()
    heard: list[LoadProgress] = []
    load_model(folder, LoadOptions("float32", on_progress=heard.append))
    first = list(takewhile(lambda one: one.stage is LoadStage.FINGERPRINT, heard))
    second = heard[len(first) :]
    for stage, reports in ((LoadStage.FINGERPRINT, first), (LoadStage.WEIGHTS, second)):
        assert {one.stage for one in reports} == {stage}
        assert {one.model for one in reports} == {folder.name}
        assert {one.total_bytes for one in reports} == {sum(each.num_bytes for each in stored)}
        assert all(a.done_bytes <= b.done_bytes for a, b in pairwise(reports))
        assert reports[-1].done_bytes == reports[-1].total_bytes
    assert len(first) == len(stored)
    assert len(second) == len(stored) + 1, "each tensor is read once, and then all are"


def test_a_draft_model_is_reported_by_its_own_name(folder_of: FolderOf) -> None:
    heard: list[LoadProgress] = []
    target, draft = folder_of("granite_moe"), folder_of("bamba")
    load_drafted(target, draft, LoadOptions("float32", on_progress=heard.append))
    assert list(dict.fromkeys(one.model for one in heard)) == [target.name, draft.name]


def test_a_tensor_counts_once_under_any_name() -> None:
    tensors = [tensor("whole", 0, 6), tensor("also", 0, 6), tensor("unread", 6, 10)]
    heard: list[LoadProgress] = []
    count = ByteCount("model", LoadStage.WEIGHTS, tensors, heard.append)
    for each in (tensors[0], tensors[0], tensors[1]):
        count.on_read(each)
    assert [one.done_bytes for one in heard] == [6]
    count.finish()
    assert [(one.done_bytes, one.total_bytes) for one in heard] == [(6, 10), (10, 10)]
