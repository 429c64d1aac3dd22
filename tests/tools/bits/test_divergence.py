"""A planted bit is found at its position and named: the layer, the part, the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import save_tiny_model
from tools.bits.divergence import Divergence, first_divergence, pointed, size_text
from tools.bits.layer_record import LayerRecorder, recorder
from tools.bits.layer_ways import (
    LAYER_WAYS,
    TracedPrompt,
    TracedRun,
    cold,
    drafted,
)
from tools.bits.models import BitsModel, random_prompts
from tools.bits.served_forms import ServedForm
from tools.bits.trace import Trace
from torch import Tensor

from ferryman.model.layers import decoder_layers, mamba
from ferryman.model.layers.decoder import Decoder
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes import state_kernels
from ferryman.model.weights import linear
from ferryman_kernels.products.packed_product import reads_panels
from ferryman_kernels.recurrence.mamba_step import StepWeights

NUM_TOKENS = 4
(PROMPT,) = random_prompts("planted", [43], 131)
PLANTED_AT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2 in layers 0, 2, 3, attention in 1 and 4."""
    return save_tiny_model(tmp_path_factory.mktemp("bamba"), "bamba")


@contextmanager
def loaded(folder: Path) -> Iterator[tuple[Decoder, LayerRecorder]]:
    with torch.inference_mode(), recorder() as (layers, stack):
        model = load_model(folder, LoadOptions("float32", page_size=16))
        layers.watch(model, stack)
        yield model, layers


def traced(model: Decoder, layers: LayerRecorder) -> Trace:
    cold(TracedRun(model, layers), PROMPT, NUM_TOKENS)
    return layers.take()


def flip(rows: Tensor, row: int) -> None:
    """The lowest bit of the first number of a row."""
    rows.view(len(rows), -1).view(torch.int32)[row, 0] ^= 1


class PlantedBit:
    """A function whose n-th prefill of `PROMPT` has a bit flipped at PLANTED_AT, once it is on."""

    def __init__(self, function: Callable[..., Any], time: int = 1) -> None:
        self.is_on = False
        self._function, self._time, self._calls = function, time, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        rows = result[0] if isinstance(result, tuple) else result
        if self.is_on and len(rows) == len(PROMPT):
            self._calls += 1
            if self._calls == self._time:
                flip(rows, PLANTED_AT)
        return result


def divergence_with(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    time: int = 1,
) -> Divergence | None:
    """The first difference between two cold runs, the second of them with a planted bit."""
    original = getattr(owner, name)
    planted = PlantedBit(original, time)

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return planted(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)
    with loaded(folder) as (model, layers):
        expected = traced(model, layers)
        planted.is_on = True
        return first_divergence(expected, traced(model, layers))


@pytest.mark.parametrize(
    ("owner", "name", "time", "place", "part"),
    [
        (state_kernels, "paged_attention_prefill", 2, "layers.4.mixer", "attention"),
        (state_kernels, "chunk_scan", 3, "layers.3.mixer", "scan"),
        (mamba, "causal_conv_prefill", 1, "layers.0.mixer", "convolution"),
        (decoder_layers, "rms_norm", 1, "layers.0.mixer_norm", "norm"),
        (decoder_layers, "add_rms_norm", 1, "layers.0", "norm"),
        (decoder_layers, "add_rms_norm", 2, "layers.1", "norm"),
    ],
    ids=["attention", "scan", "convolution", "norm", "norm of a sum", "norm of a layer's sum"],
)
def test_a_bit_of_a_kernel_is_named(
    owner: Any,
    name: str,
    time: int,
    place: str,
    part: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = divergence_with(folder, monkeypatch, owner, name, time)
    assert found is not None
    assert found.position == PLANTED_AT
    assert (found.event.key.place, found.part, found.kernels) == (place, part, name)
    assert not found.differing_inputs
    assert "1 of" in found.text()


@pytest.mark.skipif(not reads_panels(torch.float32), reason="this processor has no AVX-512")
def test_a_bit_of_a_product_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth product is the second layer's first."""
    found = divergence_with(folder, monkeypatch, linear, "packed_product", time=5)
    assert found is not None
    assert (found.position, found.event.key.place) == (PLANTED_AT, "layers.1.mixer.qkv")
    assert (found.part, found.kernels) == ("q/k/v projection", "packed_product")


def test_a_bit_between_two_calls_is_placed_between_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time steps are made by torch alone, which nobody listens to."""
    found = divergence_with(folder, monkeypatch, StepWeights, "time_steps")
    assert found is not None
    assert (found.position, found.kernels) == (PLANTED_AT, "chunk_scan")
    assert found.differing_inputs == ("1",)
    assert found.after == "causal_conv_prefill at layers.0.mixer"


def test_equal_runs_have_no_divergence(folder: Path) -> None:
    with loaded(folder) as (model, layers):
        expected = traced(model, layers)
        assert sorted(expected) == list(range(len(PROMPT) + NUM_TOKENS - 1))
        assert first_divergence(expected, traced(model, layers)) is None


def test_drafts_are_traced_wave_by_wave(folder: Path) -> None:
    with loaded(folder) as (model, layers):
        answer = cold(TracedRun(model, layers), PROMPT, NUM_TOKENS)
        expected = layers.take()
        drafted(TracedRun(model, layers), TracedPrompt(PROMPT, answer))
        found = layers.take()
    assert sorted(found) == sorted(expected)
    for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS - 1):
        scans = [event for event in found[position] if event.key.role == "scan"]
        assert [event.key.place for event in scans] == [f"layers.{n}.mixer" for n in (0, 2, 3)]


@pytest.mark.parametrize("way", [*LAYER_WAYS, "turn-2"])
def test_every_way_is_driven_to_its_end(way: str, folder: Path) -> None:
    turns = random_prompts("turn", [5], 131)
    model = BitsModel("bamba", ServedForm(folder), (PROMPT,), turns, has_own_layer=False)
    before = torch.get_num_threads()
    text = pointed(model, "bfloat16", way, num_tokens=20)
    torch.set_num_threads(before)
    assert text.startswith(("prompt 0 of 43 tokens, position", "all of 1 prompts are equal"))


def test_the_size_of_a_difference_is_said() -> None:
    one, other = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 4.0])
    assert size_text(one, other) == (
        "1 of 3 values of float32 differ, by at most 0.5 (the largest is 4)"
    )
