"""Mistakes on the command line: one line each on stderr, exit status 2, nothing started."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import save_tiny_model

from ferryman.errors import ConfigError
from ferryman.security.credentials import ClusterRole, credentials_of
from ferryman.security.credentials_file import read_credentials
from ferryman.security.key_file import read_key_file
from ferryman.settings.cluster import DoorOptions, TierOptions, UpOptions
from ferryman.settings.engine import EngineOptions
from ferryman_cli import lifecycle_reader, up
from ferryman_cli.app import run
from ferryman_cli.endpoints import BrokerPlace, broker_place, grpc_address
from ferryman_launcher.checks import check_apart
from ferryman_launcher.checks.option_checks import check
from ferryman_launcher.child import Launch
from ferryman_launcher.options import demo_model, up_options, up_sources
from ferryman_launcher.state_folder import RunningCluster, StateFolder, running_cluster

DEMO = EngineOptions(model=demo_model())
ANY = "--http-port 0 --grpc-port 0"
CLUSTER = RunningCluster(
    "http://h:1", "h:2", "nats://h:3", "redis://h:4/0", "blue", "demo", os.getpid()
)


async def _answer_here(
    argv: tuple[str, ...], environment: Mapping[str, str], launch: Launch
) -> Mapping[str, Any]:
    """The answer of `ferryman_launcher.check_apart` to its request, by this process."""
    assert argv == check_apart.ARGV
    choices, places = check_apart.options_in(json.loads(environment[check_apart.REQUEST]))
    said = json.loads(check_apart.answer_to(lambda: check_apart._checked(choices, places)))
    raise ConfigError(said["mistake"])


@pytest.fixture
def _checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has no process of its own, two seconds each time: test_check_apart has one."""
    monkeypatch.setattr(check_apart, "answer_of", _answer_here)
    monkeypatch.setattr(up, "fork_server", lambda environment, say: nullcontext())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FERRYMAN_STATE_DIR", raising=False)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("up --nonsense", "No such option: --nonsense", id="unknown flag"),
        pytest.param("up --http-port x", "--http-port", id="a port that is a word"),
        pytest.param("up --http-port 70000", "--http-port", id="a port too high"),
        pytest.param("up --prefill 0", "--prefill", id="no prefill worker"),
        pytest.param(
            f"up {ANY} --exactness bits --dtype float64",
            "exactness=bits: torch multiplies float64",
            id="bits in vain",
        ),
        pytest.param(
            f"up {ANY} --decode-tp 5", "--decode-tp 5: tp_size=5 does not divide", id="odd ranks"
        ),
        pytest.param("up --model nowhere", "there is no such folder", id="no model"),
        pytest.param("up --model .", "no config.json", id="no model in the folder"),
        pytest.param("up more", "unexpected extra argument", id="an argument too many"),
        pytest.param(f"up {ANY} --dtype float8", "float32, bfloat16, float64", id="unknown dtype"),
        pytest.param(f"up {ANY} --log-level LOUD", "DEBUG", id="unknown level"),
        pytest.param(f"up {ANY} --cluster A.b", "--cluster A.b", id="a cluster of no name"),
        pytest.param(f"up {ANY} --nats-url here", "nats://127.0.0.1:4222", id="no NATS URL"),
        pytest.param(
            f"up {ANY} --redis-url redis://127.0.0.1:1/0", "nobody answers", id="no Redis"
        ),
        pytest.param(
            f"up {ANY} --redis-url redis://me:hidden@127.0.0.1:1/0",
            "--redis-url redis://127.0.0.1:1/0: nobody",
            id="no Redis, and a password",
        ),
        pytest.param(
            f"up {ANY} --nats-url nats://me:hidden@:here",
            "--nats-url nats://:here: it should",
            id="no NATS URL, and a password",
        ),
        pytest.param(f"up {ANY} --host-memory 99T", "/dev/shm", id="too much memory"),
        pytest.param(f"up {ANY} --host-memory lots", "such as 512M", id="memory of no size"),
        pytest.param(f"up {ANY} --host-memory-bytes 5", "No such option", id="the old name"),
        pytest.param(f"up {ANY} --storage-bytes -3", "such as 512M", id="storage of no size"),
        pytest.param(f"up {ANY} --host-memory 0", "left out", id="no memory at all"),
        pytest.param(f"up {ANY} --host-memory 1K", "does not hold one page", id="a bit of memory"),
        pytest.param(
            f"up {ANY} --host-memory 1M --page-size 1024 --chunk-tokens 1024",
            "one page (1M) and one snapshot",
            id="memory for less than a page",
        ),
        pytest.param(
            f"up {ANY} --host-memory 1M --nodes 8 --prefill 8", "of a node", id="too many nodes"
        ),
        pytest.param(
            f"up {ANY} --storage-bytes 0 --storage-dir d", "no use", id="a folder of no storage"
        ),
        pytest.param(f"up {ANY} --storage-bytes 5", "M at least", id="too little storage"),
        pytest.param(
            f"up {ANY} --storage-bytes 2M --page-size 2048 --chunk-tokens 2048",
            "one page (2M)",
            id="storage for less than a page",
        ),
        pytest.param(f"up {ANY} --storage-dir {__file__}", "it is no folder", id="a file there"),
        pytest.param(
            f"up {ANY} --storage-dir /proc/none", "--storage-dir /proc/none", id="no folder there"
        ),
        pytest.param(
            f"up {ANY} --storage-dir ftp://host/p", "or s3://bucket/prefix", id="no such storage"
        ),
        pytest.param(f"up {ANY} --write-policy never", "write_back", id="unknown write policy"),
        pytest.param(f"up {ANY} --prefetch-policy x", "best_effort", id="unknown prefetch policy"),
        pytest.param(f"up {ANY} --prefetch-threshold -1", "--prefetch-threshold", id="below 0"),
        pytest.param(f"up {ANY} --snapshot-grid 24", "multiple of a page", id="a grid off pages"),
        pytest.param(
            f"up {ANY} --draft nowhere", "should be ngram, mtp, or a folder", id="a draft"
        ),
        pytest.param(
            f"up {ANY} --audit-share 0.5 --exactness values",
            "leave out the audit",
            id="an audit that would raise false alarms",
        ),
        pytest.param(f"up {ANY} --nodes 2", "--prefill is 1", id="a node without a worker"),
        pytest.param("nonsense", "No such command", id="unknown command"),
        pytest.param("trace", "Missing argument", id="no id"),
        pytest.param(
            f"trace {'x' * 129} --nats nats://h:1", "printable", id="an id that cannot be"
        ),
        pytest.param("explain x --grpc http://h:1", "HOST:PORT", id="a URL of another kind"),
        pytest.param("trace x", "no cluster runs in .ferryman", id="no cluster"),
        pytest.param("chat", "no cluster runs", id="nobody to chat with"),
        pytest.param("generate --prompt x --temperature nan", "temperature", id="not a number"),
        pytest.param("generate --prompt x --model nowhere", "no such folder", id="no such model"),
    ],
)
@pytest.mark.usefixtures("_checked_here")
def test_a_mistake_is_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert words in said.err


def test_nobody_there_is_a_failure_and_no_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_reader, "CONNECT_SECONDS", 0.1)
    assert run(["trace", "x", "--nats", f"nats://127.0.0.1:{_free_port()}"]) == 1
    assert "no broker answers" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    said = capsys.readouterr().out
    for command in ("up", "chat", "generate", "trace", "explain", "top", "events"):
        assert f"  {command} " in said


def test_a_family_that_is_not_supported_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPTJForCausalLM"]}))
    with pytest.raises(ConfigError, match="GPTJForCausalLM is not supported"):
        check(UpOptions(engine=EngineOptions(model=tmp_path)))


def test_the_url_of_a_bucket_makes_no_folder_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(
        UpOptions(
            engine=EngineOptions(model=demo_model()),
            doors=DoorOptions(http_port=0, grpc_port=0),
            tiers=TierOptions(storage_dir="s3://bucket/prefix"),
        )
    )
    assert list(tmp_path.iterdir()) == []


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    folder = str(save_tiny_model(tmp_path, "granite_nope"))
    with pytest.raises(ConfigError, match="the draft model has a vocabulary of 131 tokens"):
        check(
            UpOptions(
                engine=EngineOptions(model=demo_model(), draft=folder),
                doors=DoorOptions(http_port=0, grpc_port=0),
            )
        )


def test_a_model_without_a_drafting_layer_is_refused_before_anything_starts() -> None:
    options = EngineOptions(model=demo_model(), draft="mtp")
    with pytest.raises(ConfigError, match="--draft mtp needs a model with a layer for multi-token"):
        check(UpOptions(engine=options, doors=DoorOptions(http_port=0, grpc_port=0)))


@pytest.mark.parametrize(
    ("name", "one", "other", "words"),
    [
        ("quantize", "int8", "none", "whose models would differ"),
        ("kv_dtype", "fp8", "auto", "whose pages would differ"),
    ],
)
def test_roles_whose_state_differs_are_refused_before_anything_starts(
    name: str, one: str, other: str, words: str
) -> None:
    """They would start, and refuse every hand-off."""
    choices = UpOptions(
        engine=EngineOptions.model_validate({"model": demo_model(), name: one}),
        doors=DoorOptions(http_port=0, grpc_port=0),
        told={"decode": {name: other}},
    )
    said = f"{name} is {one} for prefill workers and {other} for decode workers, {words}"
    with pytest.raises(ConfigError, match=said):
        check(choices)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        doors = DoorOptions(http_port=0, grpc_port=port)
        with pytest.raises(ConfigError, match=rf"--grpc-port {port} on 127.0.0.1: is taken"):
            check(UpOptions(engine=DEMO, doors=doors))


def test_an_address_that_is_not_ours_is_named() -> None:
    doors = DoorOptions(host="192.0.2.1", http_port=_free_port(), grpc_port=0)
    with pytest.raises(ConfigError, match=r"--http-port \d+ on 192\.0\.2\.1"):
        check(UpOptions(engine=DEMO, doors=doors))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"page_size": "24"}, "power of two"),
        ({"page_size": "64", "chunk_tokens": "32"}, "less than a page"),
    ],
)
def test_sizes_that_do_not_fit_are_named(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        up_options(up_sources(flags, {}))


def test_two_doors_on_one_port_are_refused() -> None:
    with pytest.raises(ConfigError, match="are both 9"):
        check(UpOptions(engine=DEMO, doors=DoorOptions(http_port=9, grpc_port=9)))


def test_a_taken_port_of_a_later_router_is_named_with_its_router() -> None:
    host = "127.77.0.5"  # nobody else listens there
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        doors = DoorOptions(num_routers=2, host=host, http_port=port - 2, grpc_port=0)
        words = rf"--http-port {port} of router 2 on {host}: is taken; choose another --http-port"
        with pytest.raises(ConfigError, match=words):
            check(UpOptions(engine=DEMO, doors=doors))


@pytest.mark.parametrize(
    ("doors", "words"),
    [
        pytest.param(
            DoorOptions(num_routers=3, http_port=7000, grpc_port=7004),
            "meet at 7004, .*; choose one of them odd and the other even",
            id="the gRPC port of one is the HTTP port of another",
        ),
        pytest.param(
            DoorOptions(num_routers=2, http_port=0, grpc_port=65534),
            "--grpc-port 65534 has no ports for 2 routers up to 65535",
            id="there are no such ports",
        ),
    ],
)
def test_ports_that_several_routers_cannot_have_are_refused(doors: DoorOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(UpOptions(engine=DEMO, doors=doors))


def test_two_clusters_do_not_share_a_folder(tmp_path: Path) -> None:
    with StateFolder(tmp_path).locked():
        with pytest.raises(ConfigError, match="another ferryman up"):
            StateFolder(tmp_path).locked().__enter__()
    with StateFolder(tmp_path).locked():
        pass


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"):
        StateFolder(tmp_path / "file")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_state_folder_is_its_owner_s_alone(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.write(CLUSTER)
    assert mode_of(folder.path) == mode_of(folder.logs) == 0o700
    assert mode_of(folder.path / "cluster.json") == 0o600


def test_a_folder_of_somebody_s_own_stays_open_and_what_is_ours_in_it_is_closed(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "logs").mkdir(mode=0o755)
    folder = StateFolder(tmp_path)
    assert mode_of(tmp_path) == 0o755
    assert mode_of(folder.logs) == 0o700


def test_the_key_command_makes_a_key_once_and_checks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.key"
    assert run(["key", str(path)]) == 0
    assert mode_of(path) == 0o600
    made = path.read_text()
    assert run(["key", str(path)]) == 0
    assert path.read_text() == made
    path.write_text("no key")
    assert run(["key", str(path)]) == 2
    out, err = capsys.readouterr()
    assert made.strip() not in out + err
    assert err == f"error: cluster key {path}: a cluster key is 64 hexadecimal digits\n"


def test_the_credentials_command_writes_a_file_for_each_role_again_and_again(
    tmp_path: Path,
) -> None:
    key, folder = tmp_path / "cluster.key", tmp_path / "credentials"
    command = ["credentials", str(folder), "--key", str(key)]
    assert run(command) == 0
    assert mode_of(folder) == 0o700
    made = {path.name: path.read_text() for path in folder.iterdir()}
    servers = {"nats.conf", "redis.acl"}
    assert {*made} == servers | {f"{role}.json" for role in ClusterRole}
    assert read_credentials(folder / "decode.json") == credentials_of(
        read_key_file(key), ClusterRole.DECODE
    )
    assert run(command) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == made


def test_commands_find_the_running_cluster(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write(CLUSTER)
    assert running_cluster(tmp_path) == CLUSTER
    assert grpc_address("", tmp_path) == "h:2"
    assert broker_place("", "", "", tmp_path) == BrokerPlace("nats://h:3", "blue")
    folder.forget()
    with pytest.raises(ConfigError):
        running_cluster(tmp_path)


def test_a_cluster_that_was_killed_is_no_cluster(tmp_path: Path) -> None:
    StateFolder(tmp_path).write(RunningCluster("", "", "", "", "", "", _dead_pid()))
    with pytest.raises(ConfigError, match="no cluster runs"):
        running_cluster(tmp_path)


def test_what_is_given_counts_more_than_the_folder(tmp_path: Path) -> None:
    StateFolder(tmp_path).write(CLUSTER)
    assert grpc_address("grpc://other:5", tmp_path) == "other:5"
    assert broker_place("nats://other:6", "", "", tmp_path) == BrokerPlace("nats://other:6")


def test_commands_know_every_router_of_a_cluster(tmp_path: Path) -> None:
    StateFolder(tmp_path).write(replace(CLUSTER, http="http://h:1,http://h:3", grpc="h:2,h:4"))
    assert running_cluster(tmp_path).http_urls == ("http://h:1", "http://h:3")
    assert grpc_address("", tmp_path) == "h:2,h:4"
    assert grpc_address("grpc://a:5/, b:6", tmp_path) == "a:5,b:6"
    for mistaken in ("a:5,b", "a:5,", "a:5,http://b:6"):
        with pytest.raises(ConfigError, match="should be HOST:PORT"):
            grpc_address(mistaken, tmp_path)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _dead_pid() -> int:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return pid
