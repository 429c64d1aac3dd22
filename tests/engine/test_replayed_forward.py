"""Decode steps replayed on the processor are the steps that Python launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.plans import Guest, decode, prefill, verify
from tests.engine.runner_pair import PAGE_SIZE, RunnerPair, runner_pair
from tests.model.comparison import swept
from tests.model.telling import ALL_FAMILIES, save_telling
from tests.native import native_config, save_native
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.engine.forward import replayed_forward
from ferryman.engine.forward.decode_forward import EagerForward, StepForward
from ferryman.engine.forward.recorded_launches import recorded_launches
from ferryman.engine.forward.replayed_forward import FIRST_AFTER, ReplayedForward, narrowest_table
from ferryman.engine.memory.slabs import Slabs
from ferryman.engine.runner import Runner
from ferryman.engine.warm_up import MostTokens, warm_up
from ferryman.llm import LLM
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.state import LayerCount
from ferryman.schedule.batch import SlotOps, StepOutcome, StepPlan
from ferryman.schedule.request import SamplingParams
from ferryman.schedule.step_sizes import RECORDING_BYTES
from ferryman_kernels.elementwise.rms_norm import rms_norm

SIZES = {Kind.FULL: 40, Kind.WINDOW: 40, Kind.RECURRENT: 24}
LENS = (18, 5, 33)

MASKED = frozenset(
    {
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots3_note",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v4",
        "kimi_linear",
        "ling_25",
        "longcat_flash",
        "minicpm3",
        "minimax_m3",
        "mistral4",
        "qwen4_exp",
        "youtu",
    }
)
"""Families whose steps Python launches: a mask leaves out padding where latents, or keys of an
index, are written. DeepSeek-V4's layers read the last block that a step sees."""


class Recordings:
    """Makes a forward that replays, and remembers it."""

    def __init__(self, max_bytes: int = RECORDING_BYTES) -> None:
        self._max_bytes = max_bytes
        self.made: list[ReplayedForward] = []

    def forward_of(self, eager: EagerForward) -> StepForward:
        self.made.append(ReplayedForward(eager, PAGE_SIZE, self._max_bytes))
        return self.made[-1]

    @property
    def count(self) -> int:
        return self.made[0].num_recordings


@dataclass(frozen=True)
class RecordedPair:
    """A pair of runners, and the recordings of the one that replays."""

    runners: RunnerPair
    recordings: Recordings

    def run(self, step: StepPlan) -> StepOutcome:
        return self.runners.run(step)


def pair_of(folder: Path, dtype: str = "float32", max_bytes: int = RECORDING_BYTES) -> RecordedPair:
    recordings = Recordings(max_bytes)
    return RecordedPair(runner_pair(folder, SIZES, recordings, dtype=dtype, max_len=96), recordings)


def guests(kinds: Sequence[Kind]) -> list[Guest]:
    """Requests with six pages of each kind."""
    paged = [kind for kind in kinds if kind is not Kind.RECURRENT]
    found = []
    for row, length in enumerate(LENS):
        tokens = [(7 * i * i + 3 * i + row) % 40 + 3 for i in range(length)]
        working = 4 * row if Kind.RECURRENT in kinds else -1
        pages = range(6 * row, 6 * row + 6)
        found.append(Guest(f"{row}", tokens, row, working, dict.fromkeys(paged, pages)))
    return found


def prefilled(pair: RecordedPair) -> list[Guest]:
    found = guests(tuple(pair.runners.slabs[0].by_kind))
    clears = tuple(guest.working_slot for guest in found if guest.working_slot >= 0)
    spans = [(guest, 0, len(guest.tokens)) for guest in found]
    pair.run(prefill(1, spans, SlotOps(clears=clears)))
    return found


@pytest.fixture(params=[1, 2, 3], ids=["one-thread", "two-threads", "three-threads"])
def _threads(request: pytest.FixtureRequest, threads_set_back: None) -> None:
    torch.set_num_threads(request.param)


@pytest.mark.parametrize("family", swept(ALL_FAMILIES))
def test_replayed_steps_have_the_bits_of_launched_ones(family: str, tmp_path: Path) -> None:
    pair = pair_of(save_telling(tmp_path, family, PAGE_SIZE, 64), "bfloat16")
    anna, bert, carl = prefilled(pair)
    # Rows, slots, pages and positions change from step to step, and so do the numbers of requests.
    for index in range(8):
        pair.run(decode(2 + 2 * index, [(anna, 18 + index), (carl, 33 + index)]))
        pair.run(decode(3 + 2 * index, [(bert, 5 + index)]))
    last = [(carl, 41), (bert, 13)]
    pair.run(decode(30, last))
    refused = pair.recordings.made[0].refused.values()
    # Experts that no loop multiplies, for their shape or on this processor, are asked one by one:
    # in a layer before the first with latents, or after it.
    masked = ("aten::index.Tensor", "aten::item", "aten::bincount")
    reasons = masked if family in MASKED else "aten::bincount"
    is_known = all(reason.startswith(reasons) for reason in refused)
    assert pair.recordings.count == 2 or is_known, refused


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_replayed_steps_have_the_bits_of_launched_ones_in(dtype: str, tmp_path: Path) -> None:
    pair = pair_of(save_native(tmp_path, native_config()), dtype)
    anna, bert, _ = prefilled(pair)
    for index in range(8):
        pair.run(decode(2 + index, [(bert, 5 + index), (anna, 18 + index)]))
    assert pair.recordings.count == 1


def test_a_lone_request_is_replayed_from_its_first_step_to_its_thousandth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up has recorded its step, and wider page tables take no other recording."""
    folder, recordings = save_native(tmp_path, native_config()), Recordings()
    model = load_model(folder, LoadOptions("float32", page_size=PAGE_SIZE))
    slabs = Slabs.allocate(model.manifest, SIZES, "cpu")
    runner = Runner(model, slabs, max_rows=4, max_len=96, replays=recordings)
    warm_up(runner, model.manifest, most=MostTokens(decode=4, lone_steps=FIRST_AFTER))
    launched: list[object] = []
    monkeypatch.setattr(EagerForward, "run", lambda _, tensors: launched.append(tensors))
    anna, *_ = guests(model.manifest.kinds)
    for number, num_pages in enumerate((2, 16, 17, narrowest_table(PAGE_SIZE)), start=1):
        step = decode(number, [(anna, 17)])
        tables = {
            kind: np.resize(table, (1, num_pages)) for kind, table in step.page_tables.items()
        }
        runner.run(replace(step, page_tables=tables))
    assert launched == []
    assert recordings.count == 1


def test_a_size_that_comes_seldom_is_launched_and_not_recorded(tmp_path: Path) -> None:
    """Where requests end one after the other each size comes once or twice, and a recording would
    take longer than its replays save."""
    pair = pair_of(save_native(tmp_path, native_config()))
    anna, bert, _ = prefilled(pair)
    counts = []
    for index in range(6):
        pair.run(decode(2 + index, [(anna, 18 + index)]))
        counts.append(pair.recordings.count)
    pair.run(decode(8, [(anna, 24), (bert, 5)]))
    assert counts == [0, 0, 0, 0, 1, 1]
    assert pair.recordings.count == 1, "two requests are another size"


def test_steps_with_drafts_are_launched_between_replayed_ones(tmp_path: Path) -> None:
    pair = pair_of(save_native(tmp_path, native_config()))
    anna, _, _ = prefilled(pair)
    for index in range(7):
        pair.run(decode(2 + index, [(anna, 18 + index)]))
    pair.run(verify(9, anna, 25, [5, 6], [anna.working_slot + 1, anna.working_slot + 2]))
    pair.run(decode(10, [(anna, 28)]))
    assert pair.recordings.count == 1


def test_recordings_beyond_their_budget_make_room_for_newer_ones_but_not_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed_forward, "FIRST_AFTER", 1)
    monkeypatch.setattr(replayed_forward, "AGAIN_AFTER", 4)
    folder = save_native(tmp_path, native_config())
    whole = pair_of(folder)
    anna, bert, _ = prefilled(whole)
    for index in range(2):
        whole.run(decode(2 + index, [(anna, 18 + index)]))
    (step,) = whole.recordings.made[0]._recorded.values()
    pair = pair_of(folder, max_bytes=2 * step.num_bytes)
    anna, bert, _ = prefilled(pair)
    for index in range(8):
        pair.run(decode(10 + 2 * index, [(anna, 18 + index)]))
        pair.run(decode(11 + 2 * index, [(anna, 19 + index), (bert, 5 + index)]))
        assert pair.recordings.count <= 1, "one of two requests is twice as large as one of one"
        requests = [shape.requests for shape in pair.recordings.made[0]._recorded]
        # One of a single request went for one of two, and comes back after four launched ones.
        assert requests == ([], [2], [2], [2], [2], [2], [1], [1])[index]


def test_a_recording_that_is_larger_than_the_budget_is_not_kept(tmp_path: Path) -> None:
    pair = pair_of(save_native(tmp_path, native_config()), max_bytes=1)
    anna, _, _ = prefilled(pair)
    for index in range(7):
        pair.run(decode(2 + index, [(anna, 18 + index)]))
    assert pair.recordings.count == 0


def test_state_and_weights_that_a_recording_views_are_none_of_its_tensors() -> None:
    """Layers that cut their part out of the state's memory would count all of it."""
    state, x = torch.zeros(64, 1000), torch.arange(4.0)
    with torch.inference_mode(), recorded_launches() as recorder:
        state[3:5].view(2, 10, 100)[:, 0, :4].add_(x).mul_((x + 1).view(1, 4))
    assert recorder.recording().num_bytes == x.nbytes, "x + 1"


def _by_a_loop(x: Tensor) -> Tensor:
    return rms_norm(x, torch.full((4,), 2.0), 1e-6)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: x * 2 + 1, id="new-tensors"),
        pytest.param(lambda x: x.clone().mul_(3), id="in-place"),
        pytest.param(lambda x: torch.cat(x.topk(2, dim=1)[0].split(1)), id="several-results"),
        pytest.param(lambda x: x.T.reshape(-1)[2:].softmax(0), id="views-and-copies"),
        pytest.param(_by_a_loop, id="compiled-loop"),
        pytest.param(lambda x: torch.empty(3).fill_(7) + x[:, :3], id="empty"),
        pytest.param(lambda x: x[:, torch.tensor([0, 2])], id="indexed"),
        pytest.param(lambda x: x.T.contiguous().mul_(3) + x.T.clone(), id="other-order"),
        pytest.param(lambda x: x.double().mul_(3).bfloat16(), id="converted"),
        pytest.param(lambda x: x[:, torch.arange(2)] + torch.arange(1, 5, 2), id="row-of-numbers"),
    ],
)
def test_a_replay_computes_from_the_numbers_that_lie_there_now(
    call: Callable[[Tensor], Tensor],
) -> None:
    x, count = torch.arange(8.0).view(2, 4) - 3, LayerCount()
    with torch.inference_mode():
        with recorded_launches() as recorder:
            found = call(x)
        recording = recorder.recording()
        for factor in (-1.5, 4.0):
            x.mul_(factor).add_(1)
            before = count.num_done
            recording.replay(count)
            assert found.equal(call(x))
            assert count.num_done > before


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        pytest.param(lambda x: x.add_(int(x[0, 0])), "reads a value", id="int"),
        pytest.param(lambda x: x.add_(len(x[x > 1])), "size depends", id="mask"),
        pytest.param(lambda x: x.add_(len(x.nonzero())), "size depends", id="nonzero"),
        pytest.param(lambda x: x.add_(torch.tensor(x.tolist())), "tolist", id="tolist"),
        pytest.param(lambda x: x.add_(1 if x.sum() > 0 else 2), "reads a value", id="if"),
        pytest.param(lambda x: x.add_(torch.rand_like(x)), "random", id="random"),
        pytest.param(lambda x: x.add_(x.equal(x + 1)), "reads a value", id="equal"),
        pytest.param(lambda x: torch.arange(8.0).view(2, 4).add_(x), "constant", id="row"),
    ],
)
def test_a_call_that_reads_values_runs_to_its_end_and_is_refused(
    call: Callable[[Tensor], Tensor], reason: str
) -> None:
    x, y = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4)
    torch.manual_seed(0)
    with torch.inference_mode(), recorded_launches() as recorder:
        found = call(x)
    torch.manual_seed(0)
    assert found.equal(call(y))
    assert reason in recorder.refusal


def test_answers_are_the_same_with_and_without_replays(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config())
    prompts = [[(7 * i * i + 3 * i + row) % 120 + 3 for i in range(12 + 9 * row)] for row in (0, 1)]
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=3),
        SamplingParams(max_tokens=24, temperature=0.8, seed=7, ignore_eos=True, logprobs=3),
    ]
    found = []
    for replay_steps in (True, False):
        options = {"page_size": 16, "memory_bytes": 1 << 26, "replay_steps": replay_steps}
        with LLM(folder, dtype="float64", **options) as llm:
            found.append([llm.generate(prompts, each) for each in params])
    assert found[0] == found[1]
