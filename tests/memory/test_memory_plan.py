"""The memory of all workers of a machine: shared before anything is loaded, or refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.model.comparison import random_config
from tests.model.mtp_checkpoint import save_with_mtp
from tests.native import native_config, save_native
from tests.quantised_folders import RECIPES, save_quantised
from tests.tiny_models import save_random, save_tiny_model

from ferryman import llm
from ferryman.cache.manifest import Kind
from ferryman.engine.engine import build_engine
from ferryman.engine.memory.slabs import Slabs
from ferryman.errors import ConfigError
from ferryman.llm import LLM
from ferryman.model.config import load_config
from ferryman.model.families.inkling import read_inkling
from ferryman.model.footprint import weight_bytes
from ferryman.model.load_options import LoadOptions
from ferryman.model.shapes.config_fields import ConfigFields
from ferryman.model.shapes.manifest import state_manifest
from ferryman.model.shapes.ranks import SingleRank
from ferryman.model.shapes.state import state_views
from ferryman.schedule.step_sizes import RECORDING_BYTES
from ferryman.settings.engine import EngineOptions
from ferryman.settings.workers import BothSettings, DecodeSettings, PrefillSettings
from ferryman.sizing.machine import Card, MachineResources
from ferryman.sizing.memory_plan import ROWS, SHARE, WANTED_CONTEXT, MemoryPlan, MemoryPlanner
from ferryman.sizing.worker_size import (
    ModelFiles,
    WorkerGroup,
    WorkerPlan,
    WorkerSize,
    model_files,
    opened_bytes,
    replay_bytes,
    step_bytes,
)

GIB = 1 << 30
OPEN: dict[str, Any] = {"dtype": "auto", "device": "auto", "memory_bytes": 0, "page_size": 16}
WITHOUT_BFLOAT16 = MachineResources(16 * GIB, "MemAvailable", has_bfloat16=False)
WITH_BFLOAT16 = MachineResources(16 * GIB, "MemAvailable", has_bfloat16=True)
CARD = Card(0, "a card", 8 * GIB, has_bfloat16=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "granite_moe")


def groups(
    folder: Path, *, num_prefill: int = 1, num_decode: int = 1, **changed: Any
) -> list[WorkerGroup]:
    """Workers of both roles, nothing of their memory decided."""
    options = EngineOptions(model=folder, **{**OPEN, **changed})
    return [
        WorkerGroup("prefill", PrefillSettings(worker=options).engine, num_prefill),
        WorkerGroup("decode", DecodeSettings(worker=options).engine, num_decode),
    ]


@cache
def files_of(folder: Path) -> ModelFiles:
    return model_files(folder)


def planned(
    folder: Path,
    machine: MachineResources = WITH_BFLOAT16,
    *,
    memory: int = 0,
    reserved: int = 0,
    **changed: Any,
) -> MemoryPlan:
    planner = MemoryPlanner(files_of(folder), machine, memory=memory, reserved=reserved)
    return planner.plan(groups(folder, **changed))


def saying(folder: Path, dtype: str) -> ModelFiles:
    """The same model, its config saying that it is stored in another dtype."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', f'"dtype": "{dtype}"'))
    return model_files(folder)


@pytest.mark.parametrize(
    ("stored", "machine", "dtype", "note"),
    [
        ("float32", WITH_BFLOAT16, "float32", ""),
        ("bfloat16", WITH_BFLOAT16, "bfloat16", ""),
        ("bfloat16", WITHOUT_BFLOAT16, "float32", "for which this processor has no instructions"),
        ("bfloat16", replace(WITHOUT_BFLOAT16, cards=(CARD,)), "bfloat16", ""),
        ("float64", WITH_BFLOAT16, "float32", "never chosen"),
        ("float16", WITH_BFLOAT16, "float32", "float16 is not computed here"),
    ],
)
def test_the_dtype_is_the_checkpoints_as_far_as_this_machine_computes_it(
    stored: str, machine: MachineResources, dtype: str, note: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path, "granite_nope")
    plan = MemoryPlanner(saying(folder, stored), machine).plan(groups(folder))
    assert {worker.options.dtype for worker in plan.workers} == {dtype}
    assert note in " ".join(plan.notes)
    assert bool(plan.notes) == bool(note), "only a surprise is worth a line"


def test_bfloat16_is_taken_where_float32_does_not_fit(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "granite_nope")
    files = saying(folder, "bfloat16")
    fixed = groups(folder, memory_bytes=4 << 20)
    needs = []
    for machine in (WITH_BFLOAT16, WITHOUT_BFLOAT16):
        workers = MemoryPlanner(files, machine).plan(fixed).workers
        needs.append(sum(w.weight_bytes + w.step_bytes + w.options.memory_bytes for w in workers))
    between = replace(WITHOUT_BFLOAT16, free_bytes=sum(needs) // 2)
    plan = MemoryPlanner(files, between).plan(fixed)
    assert plan.workers[0].options.dtype == "bfloat16"
    assert "float32 does not fit" in plan.notes[0]


def test_a_card_is_taken_where_there_is_one(folder: Path) -> None:
    plan = planned(folder, replace(WITH_BFLOAT16, cards=(CARD,)))
    assert [worker.options.device for worker in plan.workers] == ["cuda", "cuda"]
    assert plan.num_bytes <= SHARE * CARD.free_bytes
    assert planned(folder).workers[0].options.device == "cpu"


def test_a_card_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device cuda:1: there is no such card here"):
        planned(folder, replace(WITH_BFLOAT16, cards=(CARD,)), device="cuda:1")


def test_ranks_lie_on_cards_one_after_the_other(folder: Path) -> None:
    cards = (CARD, replace(CARD, index=1, free_bytes=2 * GIB))
    plan = planned(folder, replace(WITH_BFLOAT16, cards=cards), tp_size=2)
    loaded_as = LoadOptions("float32", device="cuda", group=SingleRank(0, 2))
    of_rank = weight_bytes(folder, files_of(folder).tensors, loaded_as)
    assert [worker.weight_bytes for worker in plan.workers] == [2 * of_rank] * 2
    assert plan.num_bytes <= 2 * SHARE * cards[1].free_bytes, "the smaller card decides"
    with pytest.raises(ConfigError, match="device cuda:1: there is no such card"):
        planned(folder, replace(WITH_BFLOAT16, cards=cards[:1]), tp_size=2)


def test_what_was_given_is_kept(folder: Path) -> None:
    plan = planned(folder, dtype="float64", device="cpu", memory_bytes=3 << 20, max_running=2)
    for worker in plan.workers:
        options = worker.options
        assert (options.dtype, options.device, options.memory_bytes) == ("float64", "cpu", 3 << 20)


@given(
    free=st.integers(1 * GIB, 64 * GIB),
    reserved=st.integers(0, GIB // 2),
    memory=st.sampled_from([0, GIB, 3 * GIB]),
    num_prefill=st.integers(1, 3),
    num_decode=st.integers(1, 3),
    max_running=st.integers(1, 64),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_all_workers_together_stay_within_the_machine(
    folder: Path,
    free: int,
    reserved: int,
    memory: int,
    num_prefill: int,
    num_decode: int,
    max_running: int,
) -> None:
    machine = replace(WITH_BFLOAT16, free_bytes=free)
    try:
        plan = planned(
            folder,
            machine,
            memory=memory,
            reserved=reserved,
            num_prefill=num_prefill,
            num_decode=num_decode,
            max_running=max_running,
        )
    except ConfigError:
        least = (num_prefill + num_decode) * (200 << 20)
        assert (memory or free) - reserved < 2 * least, "it is refused for too little only"
        return
    assert plan.num_bytes + reserved <= (memory or free)
    for worker in plan.workers:
        assert worker.options.is_complete
        assert worker.capacity.num_bytes <= worker.options.memory_bytes
        assert worker.max_len >= min(worker.model_len, 1024)


def test_prefill_has_no_tracking_slots(folder: Path) -> None:
    """Of two workers with as many rows, the one that decodes needs three slots for each that
    runs."""
    options = EngineOptions(model=folder, **OPEN, max_running=8)
    prefill = PrefillSettings(worker=options).engine
    decode = DecodeSettings(worker=options, max_reserved=8).engine
    assert prefill.concurrency.rows == decode.concurrency.rows == 16
    assert prefill.concurrency.recurrent_slots == 16
    assert decode.concurrency.recurrent_slots == 32


def test_an_audit_has_a_row_of_its_own(folder: Path) -> None:
    options = EngineOptions(model=folder, **OPEN, max_running=8)
    decode = DecodeSettings(worker=options, max_reserved=8, audit_share=0.01).engine
    both = BothSettings(worker=options, audit_share=0.01).engine
    assert (decode.concurrency.rows, both.concurrency.rows) == (17, 9)
    assert decode.audit_share == both.audit_share == 0.01
    assert not PrefillSettings(worker=options).engine.audit_share


@pytest.mark.parametrize(
    ("free", "words"),
    [
        pytest.param(200 << 20, "no --max-running would make it fit", id="hopeless"),
        pytest.param(520 << 20, "--max-running", id="fewer rows"),
    ],
)
def test_a_refusal_says_what_would_fit(folder: Path, free: int, words: str) -> None:
    machine = replace(WITH_BFLOAT16, free_bytes=free)
    with pytest.raises(ConfigError, match="the model does not fit on cpu in float32") as refused:
        planned(folder, machine, max_running=4096)
    assert words in str(refused.value)


def test_the_promised_smaller_cluster_does_fit(folder: Path) -> None:
    machine = replace(WITH_BFLOAT16, free_bytes=520 << 20)
    with pytest.raises(ConfigError) as refused:
        planned(folder, machine, max_running=4096)
    promised = str(refused.value).rpartition("; ")[2]
    words = promised.partition(" would fit")[0].split()
    flags = dict(zip(words[::2], words[1::2], strict=False)) | {}
    changed: dict[str, Any] = {}
    if "--max-running" in words:
        changed["max_running"] = int(words[words.index("--max-running") + 1])
    if "--dtype" in words:
        changed["dtype"] = words[words.index("--dtype") + 1]
    assert flags, promised
    assert planned(folder, machine, **changed).num_bytes <= machine.free_bytes


@pytest.mark.parametrize("variant", ["granite_nope", "bamba", "gpt_oss", "gemma3"])
def test_an_engine_allocates_the_slabs_that_were_told(variant: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, variant)
    plan = planned(folder, dtype="bfloat16", max_running=3, memory=2 * GIB)
    for worker in plan.workers:
        told: WorkerPlan = worker
        with build_engine(told.options.model_copy(update={"num_threads": 1})) as engine:
            held = sum(place.num_bytes for place in engine.places.values())
            assert held == told.capacity.num_bytes
            assert engine.capacity.slots == told.capacity.slots
            assert engine.max_len == told.max_len
            assert set(engine.places) == set(told.capacity.slots) <= set(Kind)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of long contexts and large recurrent states."""
    folder = save_tiny_model(tmp_path_factory.mktemp("long"), "granite_moe")
    config = folder / "config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "max_position_embeddings": 131_072}))
    return folder


def least_memory(folder: Path, **changed: Any) -> int:
    """The least `--memory` that is not refused, to a mebibyte."""
    refused, fits = 0, 4 << 10
    while fits - refused > 1:
        tried = (refused + fits) // 2
        try:
            planned(folder, memory=tried << 20, **changed)
            fits = tried
        except ConfigError:
            refused = tried
    return fits << 20


def test_open_rows_and_contexts_share_the_memory(long_folder: Path) -> None:
    """With little memory fewer requests at once, each of a longer context; with enough of it 32."""
    least = least_memory(long_folder, max_running=32)
    asked = planned(long_folder, memory=least, max_running=32).workers
    found = planned(long_folder, memory=least, max_running=0).workers
    assert min(worker.max_len for worker in asked) < WANTED_CONTEXT
    assert {worker.options.max_running for worker in found} < {1, 2, 4, 8, 16}
    assert min(w.max_len for w in found) > min(w.max_len for w in asked)
    ample = planned(long_folder, memory=64 * GIB, max_running=0).workers
    assert {worker.options.max_running for worker in ample} == {32}
    assert {worker.max_len for worker in ample} == {131_072}
    for worker in (*found, *ample):
        assert worker.options.is_complete
        prefills = worker.role == "prefill"
        assert worker.options.max_prealloc == (worker.options.max_running if prefills else 8)


def test_open_rows_are_the_most_with_room_for_the_wanted_context(long_folder: Path) -> None:
    least = least_memory(long_folder, max_running=32)
    for memory in range(least, least + (64 << 20), 16 << 20):
        found = planned(long_folder, memory=memory, max_running=0).workers
        rows = found[0].options.max_running
        context = min(worker.max_len for worker in found)
        for more in (n for n in ROWS if n > rows):
            larger = planned(long_folder, memory=memory, max_running=more).workers
            assert min(w.max_len for w in larger) < min(WANTED_CONTEXT, context + 1)


def test_rows_that_one_role_was_given_are_kept(long_folder: Path) -> None:
    memory = least_memory(long_folder, max_running=32)
    prefill, decode = groups(long_folder, max_running=0)
    told = replace(decode, options=decode.options.model_copy(update={"max_running": 3}))
    planner = MemoryPlanner(files_of(long_folder), WITH_BFLOAT16, memory=memory)
    assert planner.plan([prefill, told]).workers[1].options.max_running == 3


def test_open_rows_that_fit_in_no_number_are_refused_in_the_same_words(long_folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(long_folder, memory=200 << 20, max_running=0)
    assert "the model does not fit on cpu in float32" in str(refused.value)
    assert "no --max-running would make it fit" in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "dtype", "tokens"),
    [
        pytest.param(WITHOUT_BFLOAT16, "bfloat16", 128, id="emulated"),
        pytest.param(WITH_BFLOAT16, "bfloat16", 512, id="bfloat16"),
        pytest.param(WITHOUT_BFLOAT16, "float32", 512, id="float32"),
        pytest.param(replace(WITH_BFLOAT16, cards=(CARD,)), "bfloat16", 2048, id="a card"),
    ],
)
def test_a_step_is_shorter_where_bfloat16_is_emulated_and_longer_on_a_card(
    folder: Path, machine: MachineResources, dtype: str, tokens: int
) -> None:
    given: dict[str, Any] = {"dtype": dtype, "device": "auto"}
    for worker in planned(folder, machine, chunk_tokens=0, **given).workers:
        assert worker.options.chunk_tokens == tokens
    of_pages = planned(folder, machine, chunk_tokens=0, page_size=256, **given).workers
    assert of_pages[0].options.chunk_tokens == max(256, tokens)
    asked = planned(folder, machine, chunk_tokens=64, **given).workers
    assert asked[0].options.chunk_tokens == 64


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        pytest.param({}, 512, id="a processor"),
        pytest.param({"device": "cuda:1"}, 2048, id="a card"),
        pytest.param({"device": "cuda", "page_size": 4096}, 4096, id="pages longer than a step"),
        pytest.param({"device": "cuda", "chunk_tokens": 64}, 64, id="as asked for"),
    ],
)
def test_the_offline_engine_has_the_steps_of_its_device(
    folder: Path, asked: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[EngineOptions] = []

    def note(options: EngineOptions) -> Any:
        built.append(options)
        raise ConfigError("not built")

    monkeypatch.setattr(llm, "build_engine", note)
    with pytest.raises(ConfigError, match="not built"):
        LLM(folder, **asked)
    assert [each.chunk_tokens for each in built] == [tokens]


@pytest.mark.parametrize(
    ("asked", "replays"),
    [
        pytest.param({"dtype": "float64"}, True, id="float64 on a processor"),
        pytest.param({"device": "cuda", "dtype": "float64"}, False, id="float64 on a card"),
        pytest.param({"device": "cuda", "dtype": "float32"}, True, id="float32 on a card"),
        pytest.param({"replay_steps": False}, False, id="told not to"),
    ],
)
def test_steps_are_replayed_where_a_graph_can_hold_them(
    folder: Path, asked: dict[str, Any], replays: bool
) -> None:
    assert EngineOptions(model=folder, **asked).replays is replays


def test_a_step_of_more_tokens_takes_more(folder: Path) -> None:
    config = MemoryPlanner(files_of(folder), WITH_BFLOAT16).config(EngineOptions(model=folder))
    few, many = (EngineOptions(model=folder, chunk_tokens=n) for n in (64, 4096))
    assert step_bytes(config, few) < step_bytes(config, many)


@pytest.mark.parametrize("family", ["minimax_m3", "qwen4_exp"])
def test_pages_of_codes_are_refused_on_a_card_where_blocks_are_chosen(
    family: str, tmp_path: Path
) -> None:
    folder = save_random(tmp_path, random_config(family, 1), 1)
    asked: dict[str, Any] = {"model": folder, "dtype": "bfloat16", "page_size": 16}
    config = load_config(folder)
    for accepted in ({"device": "cuda"}, {"kv_dtype": "fp8", "device": "cpu"}):
        options = EngineOptions(**asked | accepted)
        assert WorkerSize.of(WorkerGroup("both", options), config, 0).step_bytes > 0
    coded = EngineOptions(**asked, device="cuda", kv_dtype="fp8")
    with pytest.raises(ConfigError, match="choose kv_dtype=auto"):
        WorkerSize.of(WorkerGroup("both", coded), config, 0)


def test_a_step_counts_the_profiles_of_its_tokens() -> None:
    """Inkling's published sizes: 64 heads with a number for each of 1,024 distances."""
    path = Path(__file__).parents[1] / "model" / "published" / "thinkingmachines--Inkling.json"
    config = read_inkling(ConfigFields(path, json.loads(path.read_text())["config"]))
    options = EngineOptions(model=path.parent, dtype="bfloat16", chunk_tokens=512)
    without = replace(config, distances=tuple(replace(term, extent=0) for term in config.distances))
    assert step_bytes(config, options) - step_bytes(without, options) == 64 << 20
    halved = options.model_copy(update={"tp_size": 2})
    assert step_bytes(config, halved) - step_bytes(without, halved) == 32 << 20


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_step_counts_the_pages_that_it_opens(dtype: str, tmp_path: Path) -> None:
    """Three rows of pages that no other row has, at the model's longest context."""
    folder = save_native(tmp_path, native_config(max_position_embeddings=256))
    config = load_config(folder)
    manifest = state_manifest(config, dtype, 16, "same", kv_dtype="fp8")
    slabs = Slabs.allocate(manifest, dict.fromkeys(manifest.kinds, 3 * 16), "cpu")
    table = torch.arange(3 * 16).view(3, 16)
    found = []
    for layer in state_views(manifest, slabs.tensors).attention.values():
        pages, _ = layer.opened(table, getattr(torch, dtype))
        found.append(pages.key_pages.nbytes + pages.value_pages.nbytes)
    given: dict[str, Any] = {"model": folder, "page_size": 16, "dtype": dtype, "max_running": 3}
    as_codes, as_computed = (EngineOptions(**given, kv_dtype=kv) for kv in ("fp8", "auto"))
    assert opened_bytes(config, as_codes) == max(found) > 0
    assert opened_bytes(config, as_computed) == 0
    assert step_bytes(config, as_codes) - step_bytes(config, as_computed) == max(found)
    # A card's kernels read codes in bfloat16.
    on_card = EngineOptions(**given, kv_dtype="fp8", device="cuda")
    assert (opened_bytes(config, on_card) > 0) == (dtype != "bfloat16")


def test_a_plan_counts_weights_as_int8(folder: Path) -> None:
    as_stored, as_int8 = (
        planned(folder, dtype="bfloat16", quantize=quantize) for quantize in ("none", "int8")
    )
    planner = MemoryPlanner(files_of(folder), WITH_BFLOAT16)
    for one, other in zip(as_stored.workers, as_int8.workers, strict=True):
        assert other.weight_bytes < one.weight_bytes
        # One planner keeps the figures of both apart.
        assert [planner.weights_of(each.options) for each in (one, other)] == [
            one.weight_bytes,
            other.weight_bytes,
        ]


def test_what_is_quantised_already_is_refused_by_the_plan(tmp_path: Path) -> None:
    """From config and headers: none of its weights is there."""
    twin = save_native(tmp_path / "twin", native_config())
    folder = save_quantised(twin, tmp_path / "quantised", RECIPES["awq"])
    files = model_files(folder)
    (folder / "model.safetensors").unlink()
    planner = MemoryPlanner(files, WITH_BFLOAT16)
    with pytest.raises(ConfigError, match="quantised already, as awq; leave out quantize=int8"):
        planner.plan(groups(folder, quantize="int8"))
    assert planner.plan(groups(folder)).workers


def test_a_drafting_layer_is_planned_for(tmp_path: Path) -> None:
    """Its weights, its keys and values, and the hidden state of each recurrent slot."""
    folder = save_with_mtp(tmp_path, "deepseek_v3")
    alone, drafting = (
        planned(folder, dtype="bfloat16", max_running=3, memory=2 * GIB, draft=draft).workers[1]
        for draft in ("", "mtp")
    )
    assert drafting.weight_bytes > alone.weight_bytes
    assert Kind.RECURRENT not in alone.capacity.slots
    with build_engine(drafting.options.model_copy(update={"num_threads": 1})) as engine:
        assert engine.capacity.slots == drafting.capacity.slots
        assert Kind.RECURRENT in engine.capacity.slots
        assert engine.max_len == drafting.max_len


def test_a_decode_worker_counts_what_it_replays(folder: Path) -> None:
    decode = groups(folder, dtype="float32", device="cuda", max_running=8, memory_bytes=GIB)[1]
    config = load_config(folder)
    launched = decode.options.model_copy(update={"replay_steps": False})
    on_processor = decode.options.model_copy(update={"device": "cpu"})
    on_ranks = on_processor.model_copy(update={"tp_size": 2})
    assert replay_bytes(config, launched) == replay_bytes(config, on_ranks) == 0
    assert replay_bytes(config, on_processor) == RECORDING_BYTES
    sizes = decode.options.step_sizes(config.trunk.max_positions, pads_prompts=True)
    assert sizes is not None
    assert sizes.tail_rows == (16, 64, 256)
    assert sizes.max_tokens == 16, "running, and handed over in advance"
    assert sizes.widths() == (64, 128), "the context, and its next token"
    num_graphs, logits = 5 * 2, 16 * config.trunk.vocab_size * 4
    integers = 8 * (1 + 2 + 4 + 8 + 16) * (2 * 64 + 4 + 2 * 128 + 4)
    integers += 8 * (2 * (16 + 64 + 256) + 3 * 2 * 128)
    launches = (num_graphs + 3) * len(config.states) * (64 << 10)
    assert replay_bytes(config, decode.options) == logits + integers + launches
    prefill = groups(folder, dtype="float32", device="cuda", max_running=8, memory_bytes=GIB)[0]
    of_prompts = prefill.options.step_sizes(config.trunk.max_positions, pads_prompts=True)
    assert of_prompts is not None
    assert (of_prompts.max_requests, of_prompts.tail_rows) == (0, (16, 64, 256))
    assert 0 < replay_bytes(config, prefill.options) < replay_bytes(config, decode.options)
