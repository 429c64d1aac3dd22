"""Why fewer requests run at once than were asked for: against slots handed out one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.cache.manifests import small_manifest

from ferryman.cache.capacity import Concurrency, plan_capacity
from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.shapes.manifest import state_manifest
from ferryman.settings.declaration import parse_size
from ferryman.settings.engine import EngineOptions, engine_options
from ferryman.settings.workers import DecodeSettings
from ferryman.sizing.memory_plan import limit_of
from ferryman.sizing.running_limit import StateRoom
from ferryman.wire.nats.heartbeat import Heartbeat, ServedState, beat_from_bytes, beat_to_bytes
from ferryman_cli.app import run
from ferryman_cli.top import Seen, fleet_view
from ferryman_launcher.options import demo_model

PUBLISHED = Path(__file__).parents[1] / "model" / "published"
HYBRID = "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json"
MANIFEST = small_manifest(Kind.FULL, Kind.RECURRENT)


def handed_out(number: int, context: int, memory: int, concurrency: Concurrency) -> int:
    """Gives each of `number` requests its slots, one after the other, until some are lacking."""
    try:
        free = dict(plan_capacity(MANIFEST, memory, concurrency, step_tokens=8).slots)
    except ConfigError:
        return 0
    for admitted in range(number):
        position = 0
        while position < context:
            free[Kind.FULL] -= 1
            position += MANIFEST.page_size
        free[Kind.RECURRENT] -= 1  # the working slot
        free[Kind.RECURRENT] -= concurrency.tracking
        free[Kind.RECURRENT] -= concurrency.drafts
        if min(free.values()) < 0:
            return admitted
    return number


@given(
    memory=st.integers(0, 12_000),
    asked=st.integers(1, 12),
    context=st.integers(1, 60),
    prealloc=st.integers(0, 3),
    tracking=st.integers(0, 2),
    drafts=st.integers(0, 4),
)
def test_the_most_at_once_is_that_of_slots_handed_out_one_by_one(
    memory: int, asked: int, context: int, prealloc: int, tracking: int, drafts: int
) -> None:
    def concurrency_of(number: int) -> Concurrency:
        return Concurrency(number, prealloc, tracking, drafts)

    room = StateRoom(MANIFEST, memory, 8, concurrency_of)
    fitting = [
        number
        for number in range(1, asked + 1)
        if handed_out(number, context, memory, concurrency_of(number)) == number
    ]
    assert room.most_running(asked, context) == max(fitting, default=0)


@given(slots=st.integers(1, 60), rows=st.integers(1, 9), prealloc=st.integers(0, 3))
def test_the_warning_of_a_raised_pool_names_settings_that_raise_none(
    slots: int, rows: int, prealloc: int
) -> None:
    concurrency = Concurrency(rows, prealloc, 2, 1)
    plan = plan_capacity(MANIFEST, 1 << 20, concurrency, 8, recurrent_slots=slots)
    for warning in plan.warnings:
        said = warning.partition("; set ")[2].split(" or ")
        for name, number in (setting.split() for setting in said):
            other = int(number) if name == "max_running" else rows
            given = int(number) if name == "recurrent_slots" else slots
            kinder = Concurrency(other, prealloc, 2, 1)
            assert not plan_capacity(MANIFEST, 1 << 20, kinder, 8, recurrent_slots=given).warnings
    assert bool(plan.warnings) == (slots < rows * 4 + prealloc)


def decode_options(**changed: object) -> EngineOptions:
    options = engine_options(
        **{"model": demo_model(), "page_size": 16, "max_running": 16, "draft": "ngram", **changed}
    )
    return DecodeSettings(worker=options).engine


def run_at_4096(options: EngineOptions) -> int:
    """By the bytes of a slot and of a page alone."""
    config = load_config(options.model)
    manifest = state_manifest(config, options.dtype, 16, "", kv_dtype=options.kv_dtype)
    slots = options.capacity(manifest).slots
    pages, states = slots[Kind.FULL] // 256, slots[Kind.RECURRENT]
    return min(options.max_running, pages, states // options.concurrency.slots_per_request)


@pytest.mark.parametrize("memory", ["20M", "40M", "70M"])
def test_each_setting_in_the_sentence_gives_what_it_says(memory: str) -> None:
    options = decode_options(memory_bytes=memory)
    limit = limit_of(options)
    assert limit is not None
    assert limit.running == run_at_4096(options) < 16
    assert limit.alternatives
    for way in limit.alternatives:
        flag, _, value = way.setting.removeprefix("--").partition(" ")
        name = flag.removeprefix("no-").replace("-", "_")
        size = parse_size(value) if name == "memory_bytes" else value or False
        changed = {"memory_bytes": memory, "max_running": way.running, name: size}
        assert run_at_4096(decode_options(**changed)) == way.running, way


def test_nothing_is_said_where_all_run_that_were_asked_for() -> None:
    assert limit_of(decode_options(memory_bytes="200M")) is None


def test_the_recurrent_slots_of_a_published_hybrid_are_what_is_scarce(tmp_path: Path) -> None:
    published = json.loads((PUBLISHED / HYBRID).read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    changed = {"model": tmp_path, "dtype": "bfloat16", "memory_bytes": "1700M", "max_running": 3}
    limit = limit_of(decode_options(**changed), 8)
    assert limit is not None
    assert limit.sentence.startswith("8 asked, 3 run at 4,096 tokens: recurrent slots; ")
    assert "`--draft-tokens " in limit.sentence


def test_a_beat_carries_the_sentence_and_top_shows_it_below_the_table() -> None:
    state = ServedState("f", 16, "d", (Kind.FULL,))
    sent = Heartbeat("decode", "decode-1", 1, "h:1", True, state, 64, limit="8 asked, 3 run")
    beat = beat_from_bytes(beat_to_bytes(sent))
    console = Console(record=True, width=80)
    console.print(fleet_view([Seen(beat, 0.0)], {}, 0.0, 200))
    assert "decode-1: 8 asked, 3 run" in console.export_text()


def test_fit_prints_it_below_the_table_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["fit", "--memory-bytes", "20M", "--max-running", "16"]
    assert run(flags) == 0
    assert "decode: 16 asked, " in capsys.readouterr().out
    assert run([*flags, "--json"]) == 0
    worker = json.loads(capsys.readouterr().out)["workers"][1]
    assert worker["limit"]["running"] == worker["requests"]["4096"] < worker["limit"]["asked"] == 16
