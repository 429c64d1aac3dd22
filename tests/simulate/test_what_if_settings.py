"""The settings that are tried, and the words that set them, against the settings' declarations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ferryman.errors import ConfigError
from ferryman.settings.cluster import UpOptions
from ferryman.settings.declaration import leaves
from ferryman.settings.names import names_of, variable
from ferryman.settings.sources import Sources, environment_source
from ferryman_launcher.options import demo_model, up_options, up_sources
from ferryman_launcher.process_plan import plan_processes
from ferryman_launcher.recorded_settings import recorded_settings
from ferryman_launcher.state_folder import StateFolder
from ferryman_simulator.what_if.served_settings import (
    ServedSettings,
    read_served,
    recorded_source,
    with_changes,
)
from ferryman_simulator.what_if.setting_words import spelled
from ferryman_simulator.what_if.tunable import (
    TUNABLE,
    UNKNOWN,
    SettingChange,
    ladders,
    parse_change,
    value_text,
)

SCHEMA = Path(__file__).parents[2] / "deploy" / "helm" / "ferryman" / "values.schema.json"


def sources(**variables: str) -> Sources:
    values = {"memory_bytes": "6M", "model": str(demo_model()), **variables}
    return Sources((environment_source({variable(name): text for name, text in values.items()}),))


@pytest.fixture
def served() -> ServedSettings:
    return read_served(sources())


def every_change(served: ServedSettings) -> list[SettingChange]:
    return [change for ladder in ladders(served) for change in ladder.changes]


@pytest.mark.parametrize("name", TUNABLE)
def test_every_tunable_is_a_setting_of_its_roles(name: str) -> None:
    for role in TUNABLE[name].roles:
        assert name in names_of(role)


def test_what_is_not_simulated_is_a_setting_too() -> None:
    names = {leaf.name for leaf in leaves(UpOptions)}
    assert set(UNKNOWN) <= names
    assert not set(UNKNOWN) & set(TUNABLE)


def test_every_change_is_the_value_that_processes_then_have(served: ServedSettings) -> None:
    tried = every_change(served)
    assert {change.key[1] for change in tried} >= {"host_memory", "memory_bytes", "snapshot_grid"}
    for change in tried:
        changed = read_served(with_changes(sources(), change.assignments()))
        for role, name in change.assignments():
            if name == change.key[1]:
                before, after = (value_text(of, role, name) for of in (served, changed))
                assert before != after == change.text


def test_a_flag_a_variable_and_the_chart_set_the_same(served: ServedSettings) -> None:
    flags = {leaf.flag for leaf in leaves(UpOptions)}
    for change in every_change(served):
        words = spelled(change)
        name, _, text = words.variable.partition("=")
        assert environment_source({name: text}).mistakes == ()
        assert text == change.text
        assert not words.flag or words.flag.split()[0] in flags
        assert words.chart
        for path in words.chart:
            assert_in_chart(path.partition(":")[0])


def assert_in_chart(path: str) -> None:
    """Follows a path of values through the schema; below `settings` the names are listed."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    inside = schema
    for name in path.split("."):
        if "propertyNames" in inside:
            assert name in inside["propertyNames"]["enum"], path
            return
        inside = inside["properties"][name]
        if "$ref" in inside:
            inside = schema["definitions"][inside["$ref"].rpartition("/")[2]]


def test_nodes_share_what_the_flag_names() -> None:
    change = SettingChange(("", "host_memory"), "1M", "4M")
    words = spelled(change, num_nodes=2)
    assert (words.flag, words.chart) == ("--host-memory 8M", ("hostCache.hostMemory: 4M",))


@pytest.mark.parametrize(
    "text", ["host_memory=64G", "--host-memory=64G", "FERRYMAN_HOST_MEMORY=64G"]
)
def test_a_setting_may_be_named_as_anywhere(text: str, served: ServedSettings) -> None:
    assert parse_change(text, served).assignments() == {("hostcache", "host_memory"): "64G"}


def test_a_setting_of_one_role_changes_that_role(served: ServedSettings) -> None:
    change = parse_change("prefill_memory_bytes=1G", served)
    assert change.assignments() == {("prefill", "memory_bytes"): "1G"}
    assert spelled(change).flag == "", "no flag is for one role"
    assert spelled(change).variable == "FERRYMAN_PREFILL_MEMORY_BYTES=1G"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("host_memory", "SETTING=VALUE", id="no value"),
        pytest.param("memory_of_hosts=1G", "SETTING=VALUE", id="no setting"),
        pytest.param("draft_tokens=3", "one token a step", id="drafts"),
        pytest.param("nodes=3", "one worker of each role", id="more nodes"),
        pytest.param("log_level=DEBUG", "nothing of a simulation", id="no matter"),
        pytest.param("prefill_snapshot_share=0.3", "SETTING=VALUE", id="of another role"),
        pytest.param("both_memory_bytes=1G", "alone", id="of a worker for both"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_a_reason(
    text: str, words: str, served: ServedSettings
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_change(text, served)


def test_settings_that_up_derives_have_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"prefill worker are not known.*FERRYMAN_MEMORY_BYTES"):
        read_served(sources(memory_bytes="0"))


@pytest.mark.parametrize("storage", ["0", "8M"])
def test_a_cluster_records_what_its_processes_were_given_and_no_place(
    tmp_path: Path, storage: str
) -> None:
    flags = {"host_memory": "4M", "storage_bytes": storage}
    words = {**flags, "dtype": "float32", "max_running": "3", "chunk_tokens": "256"}
    variables = {variable("memory_bytes"): "6M", variable("memory_bytes", "decode"): "7M"}
    options = up_options(up_sources(words, variables))
    planned = plan_processes(options, StateFolder(tmp_path))
    recorded = recorded_settings(planned.services)
    assert not [text for text in recorded.values() if "/" in text or ":" in text]
    values = recorded_source({**recorded, variable("model"): str(demo_model())})
    served = read_served(Sources((environment_source(values),)))
    assert served.prefill.worker.memory_bytes == 6 << 20
    assert served.decode.worker.memory_bytes == 7 << 20
    assert served.hostcache.memory_bytes == 4 << 20
    assert served.storage_bytes == (8 << 20 if storage == "8M" else 0)
    assert (served.decode.worker.max_running, served.prefill.worker.chunk_tokens) == (3, 256)
