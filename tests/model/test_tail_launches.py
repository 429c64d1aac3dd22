"""The launches of a prompt's short chunk on a card do not follow from the chunk.

A stand-in for a card (`fake_card.py`) notes every launch of a kernel and of torch, and refuses all
that would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.engine.plans import Guest, chunk, tables
from tests.fake_card import CARD, fake_card, without_waits
from tests.model.comparison import FAMILIES, random_config, swept
from tests.native import native_config, save_native
from tests.tiny_models import cleared_state, save_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.cache.manifest import Kind
from ferryman.engine.forward.decode_forward import EagerForward, GraphedForward
from ferryman.engine.forward.step_tensors import PrefillTensors, StepTensors, pack, unpack
from ferryman.engine.forward.tail_tensors import TailTensors
from ferryman.model.layers.decoder import Model
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.manifest import pads_prompts
from ferryman.model.shapes.ranks import SINGLE_RANK
from ferryman.schedule.batch import PrefillStep, SlotOps
from ferryman.schedule.step_sizes import StepSizes
from ferryman_kernels._triton import Kernel

SIZES = StepSizes(0, 64, 16, tail_rows=(16, 64))
BITS = "cuda/9.0-nvidia-h200/bfloat16/r00000000/tp1"
CHUNKS = ((0, 5, ()), (700, 716, ((704, 3), (716, 4))))


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, lines: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(result.alias_info for result in func._schema.returns) and not any(
            argument.alias_info and argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        named = func.name().startswith("aten::")
        if named and not is_view and "empty" not in func.name() and "detach" not in func.name():
            self._lines.append(f"{func.name()} {[_shape(arg) for arg in args]}")
        return func(*args, **(kwargs or {}))


def _shape(value: Any) -> object:
    return tuple(value.shape) if isinstance(value, Tensor) else value


@contextmanager
def noted() -> Iterator[list[str]]:
    """The launches, with the sizes and numbers that the host decides."""
    lines = list[str]()

    def launcher(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            sizes = [_shape(arg) for arg in args]
            lines.append(f"{kernel._function.__name__}{grid} {sizes} {sorted(constants)}")

        return launch

    with patch.object(Kernel, "__getitem__", launcher), _Noting(lines):
        yield lines


class CountedGraphs:
    """Captures what a run launches, and counts captures and replays."""

    def __init__(self) -> None:
        self.captured: list[CountedGraphs.Graph] = []

    class Graph:
        def __init__(self, lines: list[str]) -> None:
            self.lines, self.num_replays = lines, 0

        def replay(self) -> None:
            self.num_replays += 1

    def capture(self, run: Callable[[], None]) -> CountedGraphs.Graph:
        with noted() as lines, without_waits():
            run()
        self.captured.append(CountedGraphs.Graph(lines))
        return self.captured[-1]


def padded(model: Model, start: int, end: int, snapshots: Any = ()) -> TailTensors:
    tensors = tensors_of(model, start, end, snapshots)
    assert isinstance(tensors, TailTensors)
    return tensors


def tensors_of(model: Model, start: int, end: int, snapshots: Any = ()) -> StepTensors:
    """A step of one chunk on the card, padded if it is short."""
    kinds = [kind for kind in model.manifest.kinds if kind is not Kind.RECURRENT]
    anna = Guest("anna", [1] * end, 0, 2, dict.fromkeys(kinds, [0] * (-(-end // 16))))
    cut = (chunk(anna, start, end, snapshots),)
    packed = pack(PrefillStep(1, SlotOps(), cut, tables([anna])), SIZES)
    buffer = torch.from_numpy(packed.buffer).pin_memory().to(CARD, non_blocking=True)
    return unpack(packed, buffer)


def eager_of(model: Model) -> EagerForward:
    history = torch.zeros(3, 1024, dtype=torch.int32, device=CARD)
    return EagerForward(model, None, cleared_state(model, CARD), history, SINGLE_RANK)


@pytest.mark.parametrize("arithmetic", ["any", BITS], ids=["values", "bits"])
@pytest.mark.parametrize("family", swept(FAMILIES))
def test_chunks_of_a_size_launch_the_same(family: str, arithmetic: str, tmp_path: Path) -> None:
    folder = save_random(tmp_path, random_config(family, 3), 3)
    launched = []
    with fake_card(), torch.inference_mode():
        options = LoadOptions("bfloat16", CARD, page_size=16, arithmetic=arithmetic)
        model = load_model(folder, options)
        if not pads_prompts(model.config):
            pytest.skip("its chunks are not padded")
        eager = eager_of(model)
        for where in CHUNKS:
            tensors = padded(model, *where)
            with noted() as lines, without_waits():
                assert eager.run(tensors).logits.shape == (1, model.vocab_size)
            launched.append(lines)
    assert launched[0] == launched[1]


def test_a_chunk_is_two_launches_once_its_size_was_captured(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config())
    graphs = CountedGraphs()
    with fake_card(), torch.inference_mode():
        model = load_model(folder, LoadOptions("bfloat16", CARD, page_size=16))
        forward = GraphedForward(eager_of(model), graphs, SIZES.max_tokens)
        for where in (*CHUNKS, (0, 17, ()), (40, 104, ((64, 3),))):
            forward.run(padded(model, *where))
        last = padded(model, 500, 516)
        with noted() as lines, without_waits():
            forward.run(last)
        eager = eager_of(model)
        with noted() as unpadded:
            long = tensors_of(model, 0, 300)
            assert isinstance(long, PrefillTensors)
            prefilled = eager.model.prefill(long.batch, eager.state)
            prefilled.logits(long.batch.last_tokens)
    assert [graph.num_replays for graph in graphs.captured] == [3, 2]
    # The copy of its body; the replay is the second one.
    assert [line.partition(" ")[0] for line in lines] == ["aten::copy_"]
    assert min(len(graphs.captured[0].lines), len(unpadded)) > 100
