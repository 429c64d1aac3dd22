"""Settings come from flags, the environment and a file, and a mistake names its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.errors import ConfigError
from ferryman.settings.declaration import leaves, parse_size, shorten_host_name, size_text
from ferryman.settings.engine import EngineOptions, engine_options
from ferryman.settings.groups import BusSettings, LifeSettings, ListenSettings
from ferryman.settings.names import KNOWN, SERVICES
from ferryman.settings.router import RouterSettings
from ferryman.settings.sources import (
    GivenValue,
    Origin,
    Source,
    Sources,
    as_environment,
    read_settings,
    without_settings,
)
from ferryman.settings.workers import PrefillSettings


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def settings_of(environment: Mapping[str, str], *flags: Source, config: str = "") -> Any:
    sources = Sources.of(environment, *flags, config=config)
    return read_settings(PrefillSettings, "prefill", sources)


def flag(name: str, value: object) -> Source:
    given = GivenValue(value, Origin.FLAG, "--" + name.replace("_", "-"))
    return Source({("", name): given})


def refusal(environment: Mapping[str, str], *flags: Source, config: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        settings_of(environment, *flags, config=config)
    return str(caught.value)


def written(folder: Path, text: str) -> str:
    (folder / "ferryman.toml").write_text(text)
    return str(folder / "ferryman.toml")


def test_nested_values_come_from_the_environment(model: str) -> None:
    settings = settings_of(
        {"FERRYMAN_MODEL": model, "FERRYMAN_CLUSTER": "blue", "FERRYMAN_PAGE_SIZE": "16"}
    )
    assert settings.bus == BusSettings(cluster="blue")
    assert (settings.worker.model, settings.worker.page_size) == (Path(model), 16)


def test_flags_count_more_than_the_environment_and_that_more_than_the_file(
    model: str, tmp_path: Path
) -> None:
    config = written(tmp_path, f'model = "{model}"\nport = 3\npage_size = 32\nmax_running = 5\n')
    environment = {"FERRYMAN_PORT": "1", "FERRYMAN_PAGE_SIZE": "16"}
    settings = settings_of(environment, flag("port", 2), config=config)
    assert settings.listen.port == 2
    assert (settings.worker.page_size, settings.worker.max_running) == (16, 5)
    assert settings.worker.chunk_tokens == 512


def test_what_is_said_for_a_role_counts_more_than_what_is_said_for_all(
    model: str, tmp_path: Path
) -> None:
    environment = {"FERRYMAN_TP_SIZE": "2", "FERRYMAN_PREFILL_TP_SIZE": "3"}
    assert settings_of({"FERRYMAN_MODEL": model, **environment}).worker.tp_size == 3
    told = f'model = "{model}"\ntp_size = 2\n[decode]\ntp_size = 5\n'
    assert settings_of({}, config=written(tmp_path, told)).worker.tp_size == 2
    assert settings_of({}, config=written(tmp_path, f"{told}[prefill]\ntp_size = 4\n")) == (
        settings_of({"FERRYMAN_MODEL": model, "FERRYMAN_TP_SIZE": "4"})
    )


def test_the_environment_names_the_file(model: str, tmp_path: Path) -> None:
    config = written(tmp_path, f'model = "{model}"\n')
    assert settings_of({"FERRYMAN_CONFIG": config}).worker.model == Path(model)


def test_one_name_sets_all_that_it_stands_for(model: str, tmp_path: Path) -> None:
    settings = settings_of({"FERRYMAN_MODEL": model, "FERRYMAN_HOST": "0.0.0.0"})
    assert settings.listen == settings.observe == ListenSettings(host="0.0.0.0")


def test_a_group_keeps_its_own_defaults_for_what_is_not_said(model: str) -> None:
    environment = {
        "FERRYMAN_MODEL": model,
        "FERRYMAN_HOST": "::1",
        "FERRYMAN_CLUSTER_KEY_FILE": "k",
    }
    settings = read_settings(RouterSettings, "router", Sources.of(environment))
    assert settings.http == ListenSettings(host="::1", port=8000)


def test_values_that_a_parent_wrote_are_what_the_child_reads(model: str) -> None:
    values = {"drain_seconds": 2.5, "model": model, "overlap": False, "dtype": "float64"}
    settings = settings_of(as_environment(values, "prefill"))
    assert settings == settings_of(as_environment(values))
    assert settings.life.drain_seconds == 2.5
    assert settings.worker == EngineOptions(model=Path(model), overlap=False, dtype="float64")


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
def test_nixl_is_refused_by_the_name_that_hid_its_danger(
    model: str, tmp_path: Path, place: str
) -> None:
    names = "nixl-unlocked or nixl-unlocked-or-grpc, or auto, which opens none"
    words = f"its name has to say so: write {names}"
    said = {
        "flag": lambda: refusal({"FERRYMAN_MODEL": model}, flag("planes", "nixl")),
        "environment": lambda: refusal({"FERRYMAN_MODEL": model, "FERRYMAN_PLANES": "nixl"}),
        "file": lambda: refusal(
            {}, config=written(tmp_path, f'model = "{model}"\nplanes = "nixl"\n')
        ),
    }[place]()
    assert "planes" in said.lower()
    assert said.endswith(words)


def test_a_data_plane_that_there_is_not_is_refused_with_those_there_are(model: str) -> None:
    said = refusal({"FERRYMAN_MODEL": model, "FERRYMAN_PLANES": "rdma"})
    assert said.endswith(
        "should be one of auto, grpc, nixl-rdma, nixl-unlocked, nixl-unlocked-or-grpc"
    )


def test_settings_do_not_change(model: str) -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings_of({"FERRYMAN_MODEL": model}).life = LifeSettings()


BAD = [
    ("PORT", "70000", "should be less than or equal to 65535"),
    ("PORT", "http", "should be a valid integer, unable to parse string as an integer"),
    ("PAGE_SIZE", "48", "should be a power of two"),
    ("SNAPSHOT_GRID", "32", "should be a multiple of a page of 64 tokens"),
    ("MEMORY_BYTES", "lots", "it should be a size such as 512M, 2G or 1048576"),
    (
        "MODEL",
        "/nowhere",
        "there is no such folder, and no such GGUF file; name one, or a model on the hub as "
        "owner/name",
    ),
    ("DRAFT", "/nowhere", "should be ngram, mtp, or a folder or GGUF file with a draft model"),
    ("DRAFT_TOKENS", "0", "should be greater than or equal to 1"),
    ("DTYPE", "float8", "it should be one of auto, float32, bfloat16, float64"),
    ("CLUSTER", "A.B", "String should match pattern '^[a-z0-9-]{1,32}$'"),
]


@pytest.mark.parametrize(("name", "value", "line"), BAD)
def test_a_bad_value_is_one_line_with_the_variable(
    model: str, name: str, value: str, line: str
) -> None:
    environment = {"FERRYMAN_MODEL": model, f"FERRYMAN_{name}": value}
    assert refusal(environment) == f"FERRYMAN_{name}={value!r}: {line}"


def test_a_bad_value_is_called_by_the_name_under_which_it_was_given(
    model: str, tmp_path: Path
) -> None:
    known = {"FERRYMAN_MODEL": model}
    line = "should be a power of two"
    assert refusal(known, flag("page_size", "7")) == f"--page-size 7: {line}"
    assert refusal(known | {"FERRYMAN_PREFILL_PAGE_SIZE": "7"}) == (
        f"FERRYMAN_PREFILL_PAGE_SIZE='7': {line}"
    )
    config = written(tmp_path, "[prefill]\npage_size = 7\n")
    assert refusal(known, config=config) == f"{config}: prefill.page_size=7: {line}"


@pytest.mark.parametrize("value", ["'sixteen'", "[16]", "{a = 16}", "16.5", "1979-05-27"])
def test_a_value_of_another_type_in_the_file_is_one_line(
    model: str, tmp_path: Path, value: str
) -> None:
    config = written(tmp_path, f"page_size = {value}\n")
    said = refusal({"FERRYMAN_MODEL": model}, config=config)
    assert said.startswith(f"{config}: page_size=")
    assert "\n" not in said


def test_a_program_s_options_are_the_same_and_refused_in_the_same_words(model: str) -> None:
    options = engine_options(model=Path(model), page_size=16, draft=Path(model), memory_bytes="1M")
    assert (options.page_size, options.draft, options.memory_bytes) == (16, model, 1 << 20)
    with pytest.raises(ConfigError, match=r"^page_size=24: should be a power of two$"):
        engine_options(model=Path(model), page_size=24)
    with pytest.raises(ConfigError, match=r"^page_sise is no option; did you mean page_size\?$"):
        engine_options(model=Path(model), page_sise=16)
    with pytest.raises(ConfigError, match=r"^quantize=int3: it should be one of none, int8$"):
        engine_options(model=Path(model), quantize="int3")
    with pytest.raises(ConfigError, match=r"^max_prealloc is no option"):
        engine_options(model=Path(model), max_prealloc=3)


def test_what_is_missing_is_named() -> None:
    assert refusal({}) == "FERRYMAN_MODEL is not set"
    assert refusal({"FERRYMAN_PAGE_SIZE": "16"}) == "FERRYMAN_MODEL is not set"


def test_what_is_empty_counts_as_not_set(model: str) -> None:
    assert refusal({"FERRYMAN_MODEL": ""}) == "FERRYMAN_MODEL is not set"
    assert settings_of({"FERRYMAN_MODEL": model, "FERRYMAN_PORT": ""}).listen.port == 0


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        pytest.param("FERRYMAN_PAGESIZE", "FERRYMAN_PAGE_SIZE", id="a slip"),
        pytest.param("FERRYMAN_PREFILL_PAGESIZE", "FERRYMAN_PAGE_SIZE", id="a slip for a role"),
        pytest.param("FERRYMAN_PREFILL_BUS__URL", "FERRYMAN_NATS_URL", id="an old name"),
        pytest.param("FERRYMAN_ROUTER_INDEX__URL", "FERRYMAN_REDIS_URL", id="an old one, router"),
        pytest.param("FERRYMAN_DECODE_WORKER__DTYPE", "FERRYMAN_DTYPE", id="an old one, decode"),
        pytest.param(
            "FERRYMAN_HOSTCACHE_MEMORY_BYTES", "FERRYMAN_HOST_MEMORY", id="an old one, host-cache"
        ),
        pytest.param(
            "FERRYMAN_HOSTCACHE_STORAGE__FOLDER", "FERRYMAN_STORAGE_DIR", id="an old one, storage"
        ),
    ],
)
def test_a_name_that_is_no_setting_is_seen_and_the_nearest_told(
    model: str, variable: str, near: str
) -> None:
    said = refusal({"FERRYMAN_MODEL": model, variable: "16"})
    assert said == f"{variable} is no setting; did you mean {near}?"


def test_a_setting_of_another_role_alone_is_no_setting_for_this_one(model: str) -> None:
    assert refusal({"FERRYMAN_MODEL": model, "FERRYMAN_PREFILL_API_KEYS": "a"}).startswith(
        "FERRYMAN_PREFILL_API_KEYS is no setting"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("page_sise = 16", "page_sise is no setting; did you mean page_size?"),
        ("[prefil]\nport = 1", "prefil is no setting; did you mean prefill?"),
        ("[router]\nhttp_prt = 1", "router.http_prt is no setting; did you mean http_port?"),
        ("[router]\npage_size = 16", "router.page_size is no setting"),
        ("xyzzy = 1", "xyzzy is no setting"),
        ("page_size 16", "Expected '=' after a key in a key/value pair (at line 1, column 11)"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    model: str, tmp_path: Path, text: str, line: str
) -> None:
    config = written(tmp_path, text)
    assert refusal({"FERRYMAN_MODEL": model}, config=config) == f"{config}: {line}"


def test_a_file_that_is_not_there_is_named() -> None:
    assert refusal({}, config="/nowhere.toml") == "/nowhere.toml: No such file or directory"


def test_all_mistakes_are_told_at_once(model: str, tmp_path: Path) -> None:
    config = written(tmp_path, "port = -1\nnods = 1\n")
    environment = {"FERRYMAN_MODEL": model, "FERRYMAN_DTYPE": "int4", "FERRYMAN_PROT": "1"}
    said = refusal(environment, config=config).split("\nerror: ")
    assert [line.partition(" ")[0].partition("=")[0] for line in said] == [
        "FERRYMAN_DTYPE",
        f"{config}:",
        "FERRYMAN_PROT",
        f"{config}:",
    ]


def test_settings_of_other_services_and_of_tests_are_passed_over(
    model: str, tmp_path: Path
) -> None:
    config = written(tmp_path, f'model = "{model}"\nhttp_port = 1\n[router]\nhost = "::1"\n')
    environment = {"FERRYMAN_API_KEYS": "a", "FERRYMAN_TEST_RANKS": "1", "FERRYMAN_STATE_DIR": "s"}
    assert settings_of(environment, config=config).listen == ListenSettings()


def test_a_child_that_is_told_nothing_inherits_no_setting() -> None:
    around = {"PATH": "/bin", "FERRYMAN_API_KEYS": "secret", "FERRYMAN_TEST_RANKS": "1"}
    assert without_settings(around) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("protocol", "endpoint"),
    [
        pytest.param("", "http://collector:4318", id="the standard's own default"),
        pytest.param("http/protobuf", "http://collector:4318", id="HTTP"),
        pytest.param("grpc", "grpc://collector:4318", id="gRPC"),
    ],
)
def test_opentelemetrys_own_variables_name_the_collector(
    model: str, protocol: str, endpoint: str
) -> None:
    environment = {
        "FERRYMAN_MODEL": model,
        "FERRYMAN_CLUSTER_KEY_FILE": "/key",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }
    settings = read_settings(RouterSettings, "router", Sources.of(environment))
    assert settings.traced.otlp_endpoint == endpoint
    ours = {**environment, "FERRYMAN_OTLP_ENDPOINT": "http://other:1"}
    settings = read_settings(RouterSettings, "router", Sources.of(ours))
    assert settings.traced.otlp_endpoint == "http://other:1"


def test_every_setting_has_a_meaning_and_at_most_85_names_are_to_be_known() -> None:
    found = [leaf for kind in SERVICES.values() for leaf in leaves(kind)]
    assert [leaf.path for leaf in found if not leaf.meaning] == []
    assert len(KNOWN) <= 85


@given(st.integers(-5, 70000))
def test_a_port_is_taken_or_refused_and_never_bent(port: int) -> None:
    try:
        settings = settings_of({"FERRYMAN_MODEL": "/"}, flag("port", port))
    except ConfigError:
        assert not 0 <= port <= 65535
    else:
        assert settings.listen.port == port


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("7", 7), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("4 KB", 4096)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("num_bytes", [7, 4096, 512 << 20, 3 << 29, 5 << 40])
def test_sizes_are_written_as_they_are_read(num_bytes: int) -> None:
    assert parse_size(size_text(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("ip-10-0-123-45.eu-central-1.compute.internal", "ip-10-0-123-45-eu-centr-"),
        ("gke-production-default-pool-9d8a7b6c-x2lk", "gke-production-default-"),
        ("node-1.example.org", "node-1-example-org-"),
    ],
)
def test_a_host_s_full_name_becomes_a_short_one_that_tells_which(name: str, kept: str) -> None:
    short = str(shorten_host_name(name))
    assert short.startswith(kept)
    assert len(short) <= 32
    assert set(short) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert short != shorten_host_name(f"{name}0"), "another host of the same beginning"
    assert short == shorten_host_name(short), "a short one stays as it is"


@pytest.mark.parametrize("name", ["node 1", "Node", "a..b", "a/b", "a" * 64, 7])
def test_a_name_of_no_host_is_left_to_be_refused(name: object) -> None:
    assert shorten_host_name(name) == name
