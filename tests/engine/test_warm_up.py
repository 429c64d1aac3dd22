"""The warm-up compiles every kernel that a decode step can ever launch, on a card and elsewhere.

On a card launches are noted and not run: what Triton compiles depends on types, sizes and addresses
alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.engine.replayed_graphs import like_a_card
from tests.model.comparison import random_config
from tests.native import native_config, save_native
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.cache.keys import as_token_ids
from ferryman.cache.manifest import Kind, StateManifest
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.engine.warm_up import MostTokens, warm_up
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.schedule.batch import (
    Chunk,
    DecodeStep,
    Ints,
    PrefillStep,
    RowSeed,
    SampleRequest,
    SlotCopy,
    SlotOps,
    SlotSnapshot,
)
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.step_sizes import StepSizes
from ferryman_kernels._triton import Kernel
from ferryman_kernels.cpu import _compiled
from ferryman_kernels.cpu._compiled import Loop

Key = tuple[object, ...]
MAX_LEN = 5000
GREEDY = SamplingParams(temperature=0.0)
SEEDS = tuple(RowSeed(row, as_token_ids([1] * MAX_LEN)) for row in range(9))


@contextmanager
def noted_launches() -> Iterator[set[Key]]:
    """What Triton would compile, and keeps by: `JITFunction` specialises by the same."""
    seen: set[Key] = set()

    def launcher(kernel: Kernel, grid: tuple[int, ...]) -> Any:
        def launch(*args: object, **constants: object) -> None:
            name = kernel._function.__name__
            seen.add((name, *map(_specialised, args), *sorted(map(repr, constants.items()))))

        return launch

    with (
        patch.object(Kernel, "__getitem__", launcher),
        # Results that no kernel has written are numbers.
        patch.object(torch, "empty", torch.zeros),
        like_a_card(),
    ):
        yield seen


def _specialised(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "1" if value == 1 else (value % 16 == 0, value.bit_length() > 31)
    return type(value)


def random_step(manifest: StateManifest, step_id: int, rng: random.Random) -> DecodeStep:
    """Some requests anywhere, some of them with drafts."""
    runs = sorted((rng.choice((1, 1, 2, 4)) for _ in range(rng.randint(1, 9))), reverse=True)
    waves = tuple(sum(n > wave for n in runs) for wave in range(runs[0]))
    rows = np.concatenate([np.arange(n) for n in waves])
    behind = np.repeat(np.arange(len(waves)), waves)
    firsts = np.array([rng.randrange(1, rng.choice((60, 1500, MAX_LEN)) - 4) for _ in runs])
    positions = firsts[rows] + behind
    pages = int(positions.max()) // manifest.page_size + 1
    return DecodeStep(
        step_id=step_id,
        ops=_random_ops(manifest, rng, SEEDS if step_id == 1 else ()),
        request_ids=tuple(map(str, range(len(runs)))),
        rows=rows,
        positions=positions,
        read_slots=4 + 4 * rows,
        write_slots=4 + 4 * rows + behind,
        verify_depths=waves,
        page_tables={
            kind: np.zeros((len(rows), pages), np.int64)
            for kind in manifest.kinds
            if kind is not Kind.RECURRENT
        },
        draws=tuple(
            SampleRequest(row, position + 1, 1, GREEDY)
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
        ),
        drafts=(3,) * (len(rows) - waves[0]),
    )


def _random_ops(manifest: StateManifest, rng: random.Random, seeds: tuple[RowSeed, ...]) -> SlotOps:
    """Slots that no token names: none of a request's is above 36."""
    slots = list(range(60, 80))
    rng.shuffle(slots)
    return SlotOps(
        seeds=seeds,
        clears=tuple(slots[: rng.randrange(4)]),
        copies=tuple(SlotCopy(30 + n, n, kind) for kind in manifest.kinds for n in _few(rng)),
        saves=tuple(SlotSnapshot(slots[4 + n], slots[8 + n], 16) for n in _few(rng)),
        snapshots=tuple(SlotSnapshot(slots[12 + n], slots[16 + n], 16) for n in _few(rng)),
    )


def _few(rng: random.Random) -> range:
    return range(rng.randrange(4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted on the processor")
def test_no_decode_step_launches_what_the_warm_up_has_not(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config(max_position_embeddings=MAX_LEN + 1))
    model = load_model(folder, LoadOptions("float32", page_size=16))
    sizes = StepSizes(9, MAX_LEN // 16 + 1, 16, num_drafts=3)
    slots = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 80}
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    runner = Runner(model, slabs, max_rows=9, max_len=MAX_LEN + 1, sizes=sizes)
    rng = random.Random("steps")
    with noted_launches() as seen:
        warm_up(runner, model.manifest)
        first = set(seen)
        warm_up(runner, model.manifest, sizes)
        compiled = set(seen)
        seen.clear()
        steps = [random_step(model.manifest, n, rng) for n in range(1, 41)]
        for step in steps:
            runner.run(step)
    assert {kernel for kernel, *_ in seen} == {
        "_add_rms_norm_kernel",
        "_causal_conv_decode_kernel",
        "_clear_slots_kernel",
        "_copy_slots_kernel",
        "_decode_join_kernel",
        "_decode_split_kernel",
        "_delta_decode_kernel",
        "_delta_inputs_kernel",
        "_finite_argmax_kernel",
        "_gated_silu_kernel",
        "_heads_into_pages_kernel",
        "_rms_norm_kernel",
        "_selective_state_update_kernel",
    }
    assert not seen <= first, "one prefill and one decode step compile less"
    assert seen <= compiled, "a request would wait for a compiler"
    assert {sizes.of(step) for step in steps} != {sizes.of(steps[0])}


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted on the processor")
@pytest.mark.parametrize("tail_rows", [(), (16, 64, 256)], ids=["launched", "padded"])
def test_no_prompts_launch_what_the_warm_up_has_not(
    tail_rows: tuple[int, ...], tmp_path: Path
) -> None:
    folder = save_native(tmp_path, native_config(max_position_embeddings=MAX_LEN + 1))
    model = load_model(folder, LoadOptions("float32", page_size=16))
    slots = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 80}
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    sizes = StepSizes(0, MAX_LEN // 16 + 1, 16, tail_rows=tail_rows)
    runner = Runner(model, slabs, max_rows=9, max_len=MAX_LEN + 1, sizes=sizes)
    rng = random.Random("prompts")
    with noted_launches() as seen:
        warm_up(runner, model.manifest)
        first = set(seen)
        warm_up(runner, model.manifest, sizes, MostTokens(prefill=512))
        compiled = set(seen)
        seen.clear()
        for number in range(1, 31):
            runner.run(random_prompts(model.manifest, number, rng))
        runner.run(prompts_of(model.manifest, 31, [(2048, 2050)]))
    assert not seen <= first, "one short prompt compiles less"
    assert seen <= compiled, "a prompt would wait for a compiler"


def random_prompts(manifest: StateManifest, step_id: int, rng: random.Random) -> PrefillStep:
    starts = [rng.choice((0, 0, 16, 64, 512, 2048)) for _ in range(rng.randint(1, 4))]
    return prompts_of(manifest, step_id, [(start, start + rng.randint(1, 300)) for start in starts])


def prompts_of(manifest: StateManifest, step_id: int, spans: list[tuple[int, int]]) -> PrefillStep:
    chunks = tuple(
        Chunk(
            request_id=f"r{row}",
            row=row,
            start=start,
            end=end,
            token_ids=as_token_ids([1] * (end - start)),
            working_slot=row,
            snapshots=(),
            draws=(SampleRequest(row, end, end, GREEDY),),
        )
        for row, (start, end) in enumerate(spans)
    )
    pages = max(end for _, end in spans) // manifest.page_size + 1
    tables: dict[Kind, Ints] = {
        kind: np.zeros((len(spans), pages), np.int64)
        for kind in manifest.kinds
        if kind is not Kind.RECURRENT
    }
    has_slots = Kind.RECURRENT in manifest.kinds
    clears = tuple(row for row, (start, _) in enumerate(spans) if has_slots and not start)
    return PrefillStep(step_id, SlotOps(clears=clears), chunks, tables)


def loops() -> set[Loop]:
    """Every loop for the processor in this process."""
    kernels = [
        module for name, module in sys.modules.items() if name.startswith("ferryman_kernels.")
    ]
    return {found for module in kernels for found in vars(module).values() if type(found) is Loop}


def compiled_loops() -> set[Key]:
    """Every version of a loop, with the types that it was compiled for."""
    return {
        (loop.function.__module__, loop.function.__name__, version, str(types))
        for loop in loops()
        for version in ("alone", "shared")
        if version in vars(loop)
        for types in vars(loop)[version].signatures
    }


@pytest.fixture
def loops_of_two_versions(monkeypatch: pytest.MonkeyPatch, threads_set_back: None) -> None:
    """Few elements are shared. The version for several threads counts as one of its own, and is
    the other one: to compile it takes seconds."""
    compiled = Loop._compile
    monkeypatch.setattr(Loop, "_compile", lambda loop, *, parallel: compiled(loop, parallel=False))
    torch.set_num_threads(2)
    monkeypatch.setattr(_compiled, "WORTH_SHARING", 1000)
    for loop in loops():
        monkeypatch.delitem(vars(loop), "shared", raising=False)


@pytest.mark.usefixtures("loops_of_two_versions")
def test_no_decode_step_compiles_a_loop_for_the_processor(tmp_path: Path) -> None:
    """Steps of many requests go to the version for several threads."""
    runner, manifest = runner_on_a_processor(tmp_path)
    warm_up(runner, manifest, most=MostTokens(decode=36))
    warmed, rng = compiled_loops(), random.Random("loops")
    for number in range(1, 7):
        runner.run(random_step(manifest, number, rng))
    assert {version for _, _, version, _ in warmed} == {"alone", "shared"}
    assert compiled_loops() - warmed == set(), "a request would wait for a compiler"


def save_mixed(folder: Path) -> None:
    save_native(folder, native_config(max_position_embeddings=MAX_LEN + 1))


def save_choosing(folder: Path, family: str) -> None:
    """A model whose index chooses more keys than a prompt of a page has."""
    config = random_config(family, seed=4)
    config.index_topk, config.max_position_embeddings = 60, MAX_LEN + 1
    save_random(folder, config, 4)


@pytest.mark.usefixtures("loops_of_two_versions")
@pytest.mark.parametrize(
    "save",
    [
        pytest.param(save_mixed, id="three mixers"),
        pytest.param(partial(save_choosing, family="deepseek_v32"), id="an index of tokens"),
        pytest.param(partial(save_choosing, family="deepseek_v4"), id="an index of blocks"),
    ],
)
def test_no_prompt_compiles_a_loop_for_the_processor(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, manifest = runner_on_a_processor(tmp_path, save)
    # A page and a token stay below it in every loop but the products'.
    monkeypatch.setattr(_compiled, "WORTH_SHARING", 20_000)
    warm_up(runner, manifest, most=MostTokens(decode=36))
    warmed = compiled_loops()
    runner.run(prompts_of(manifest, 1, [(0, 900), (0, 700)]))
    assert compiled_loops() - warmed == set(), "a prompt would wait for a compiler"


def runner_on_a_processor(
    folder: Path, save: Callable[[Path], None] = save_mixed
) -> tuple[Runner, StateManifest]:
    save(folder)
    model = load_model(folder, LoadOptions("float32", page_size=16))
    slots = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 80}
    slabs = Slabs.allocate(model.manifest, slots, "cpu")
    return Runner(model, slabs, max_rows=9, max_len=MAX_LEN + 1), model.manifest
