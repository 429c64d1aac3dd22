"""Weights are read from a mapped file, once, cut before they are copied, and never kept mapped."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from tests.model.conftest import FolderOf, prompt
from tests.model.paged_run import PagedRun, Part
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import family_of
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.ranks import SingleRank, share_of, slice_of
from ferryman.model.weights.checkpoint import TORCH_DTYPES, open_checkpoint
from ferryman.model.weights.named_weights import Weights

SECOND = SingleRank(rank=1, num_ranks=3)
"""The second of three ranks, as far as it cuts its weights."""
WHOLE = torch.arange(24 * 10, dtype=torch.float32).view(24, 10).sin()


@pytest.fixture
def copied(folder_of: FolderOf, tmp_path: Path) -> Path:
    shutil.copytree(folder_of("bamba"), tmp_path / "model")
    return tmp_path / "model"


def is_mapped(file: Path) -> bool:
    """Whether this process still maps the file, as the kernel says."""
    return str(file) in Path("/proc/self/maps").read_text()


def weights_of(folder: Path, dtype: torch.dtype, **tensors: Tensor) -> Weights:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return Weights(open_checkpoint(folder), dtype, torch.device("cpu"))


def logits(model: Model) -> Tensor:
    run = PagedRun(model)
    return run.prefill([Part(run.start(), prompt(0)[:20])])[0]


def test_an_open_checkpoint_is_mapped_and_a_loaded_model_is_not(copied: Path) -> None:
    file = copied / "model.safetensors"
    checkpoint = open_checkpoint(copied)
    assert is_mapped(file)
    del checkpoint
    assert not is_mapped(file)
    for dtype in ("float32", "bfloat16", "float64"):
        model = load_model(copied, LoadOptions(dtype))
        assert not is_mapped(file), f"a tensor of {model} lies in the file"


def test_a_model_stays_as_it_was_loaded_when_its_file_changes(copied: Path) -> None:
    model = load_model(copied, LoadOptions("float64", page_size=16))
    before, file = logits(model), copied / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size // 2))
    assert torch.equal(logits(model), before)
    file.write_bytes(b"")
    assert torch.equal(logits(model), before)


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copied / "model.safetensors"

    def replace_first(folder: Path) -> object:
        tensors = load_file(file)
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, copied / "new")
        (copied / "new").rename(file)
        return family_of(folder)

    monkeypatch.setattr("ferryman.model.registry.family_of", replace_first)
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed while it was loaded"):
        load_model(copied, LoadOptions("float32"))


@pytest.mark.parametrize("name", [name for name in TORCH_DTYPES if name != "F8_E8M0"])
def test_a_view_has_the_bytes_that_the_library_stored(name: str, tmp_path: Path) -> None:
    dtype = TORCH_DTYPES[name]
    odd = torch.tensor([1, 0, 1], dtype=torch.uint8)  # what follows it is not aligned by itself
    tensors = {"odd": odd, "value": (WHOLE * 100).to(dtype), "none": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for each, expected in load_file(tmp_path / "model.safetensors").items():
        view = checkpoint.view(checkpoint.tensors[each])
        assert view.dtype is expected.dtype
        assert torch.equal(view.view(torch.uint8), expected.view(torch.uint8))


def test_tensors_at_odd_bytes_are_read_too(tmp_path: Path) -> None:
    written = save({"value": WHOLE})
    length = int.from_bytes(written[:8], "little")
    header = written[8 : 8 + length] + b" "
    moved = len(header).to_bytes(8, "little") + header + written[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(moved)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["value"].start % 2 == 1
    assert torch.equal(checkpoint.view(checkpoint.tensors["value"]), WHOLE)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(partial(slice_of, group=SECOND), id="rows"),
        pytest.param(partial(slice_of, group=SECOND, axis=1), id="columns"),
        pytest.param(partial(share_of, heads=3, group=SECOND), id="heads"),
        pytest.param(lambda whole: torch.cat([whole[20:], whole[:2]]), id="two pieces"),
        pytest.param(lambda stacked: stacked[5][2:4], id="one of many"),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.3, WHOLE[:, :1].to(torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_part_is_that_part_of_the_whole_in_memory_of_its_own(
    part: Callable[[Tensor], Tensor], factor: float | Tensor, dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = weights_of(tmp_path, dtype, value=WHOLE).scaled({"value": factor})
    found = weights.tensor("value", 24, 10, part=part)
    whole = weights.tensor("value", 24, 10)
    assert torch.equal(found, part(whole))
    assert found.untyped_storage().nbytes() == found.nbytes
    exact = WHOLE.to(torch.float64) * factor
    assert torch.allclose(whole.to(torch.float64), exact, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_is_rounded_by_way_of_the_accumulation_dtype(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (4096,), generator=random)
    value = torch.cat([bits.view(torch.float64).nan_to_num(), WHOLE.double().flatten()]).to(stored)
    weights = weights_of(tmp_path, dtype, value=value)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    found = weights.tensor("value", math.prod(value.shape))
    assert torch.equal(found, value.to(wide).to(dtype))
