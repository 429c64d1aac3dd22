"""Models by their id, with the hub's own client against a local stand-in of its API."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.hub.stand_in import (
    COMMIT,
    HubStandIn,
    Repository,
    hub_stand_in,
    point_client_at,
    repository_of,
)
from tests.tiny_models import save_tiny_model

from ferryman.errors import ConfigError
from ferryman.hub.client import HubModel
from ferryman.hub.models import (
    description_folder,
    fetch_weights,
    hub_model,
    is_complete,
    is_hub_id,
    model_folder,
    remote_tensors,
)
from ferryman.model.weights.checkpoint import open_checkpoint

NAME = "acme/granite-tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two shards with an index."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), "granite_nope")
    _cut(folder)
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub that has the model, and a client with an empty cache and no token."""
    with hub_stand_in() as stand_in:
        point_client_at(stand_in, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        stand_in.repositories[NAME] = repository_of(folder)
        yield stand_in


def _cut(folder: Path) -> None:
    """Divides `model.safetensors` into two shards."""
    whole = folder / "model.safetensors"
    content = whole.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        first, last = (header[part[end]]["data_offsets"][end] for end in (0, -1))
        shifted = {
            name: {
                **header[name],
                "data_offsets": [at - first for at in header[name]["data_offsets"]],
            }
            for name in part
        }
        text = json.dumps(shifted).encode()
        file = f"model-{number:05}-of-00002.safetensors"
        shard = struct.pack("<Q", len(text)) + text + content[begin + first : begin + last]
        (folder / file).write_bytes(shard)
        weight_map |= dict.fromkeys(part, file)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_an_id_becomes_a_folder_with_everything_that_is_needed(
    hub: HubStandIn, folder: Path
) -> None:
    found = model_folder(NAME)
    assert found.name == COMMIT
    for name in ("config.json", *SHARDS):
        assert (found / name).read_bytes() == (folder / name).read_bytes()
    assert open_checkpoint(found).tensors.keys() == open_checkpoint(folder).tensors.keys()


def test_nothing_is_downloaded_twice(hub: HubStandIn) -> None:
    model_folder(NAME)
    assert len(hub.got(SHARDS[0])) == 1
    model_folder(NAME)
    assert len(hub.got(SHARDS[0])) == 1


def test_the_headers_are_told_without_the_weights(hub: HubStandIn, folder: Path) -> None:
    model = HubModel(NAME)
    described = description_folder(model)
    assert not is_complete(described)
    tensors = remote_tensors(model, described)
    expected = open_checkpoint(folder).tensors
    assert {name: (t.dtype, t.shape, t.num_bytes) for name, t in tensors.items()} == {
        name: (t.dtype, t.shape, t.num_bytes) for name, t in expected.items()
    }
    assert all(span.startswith("bytes=") for name in SHARDS for span in hub.got(name))
    assert not is_complete(described)


def test_a_file_that_breaks_off_goes_on_where_it_broke(
    hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    hub.breaks[SHARDS[1]] = 50_500
    found = model_folder(NAME)
    assert (found / SHARDS[1]).read_bytes() == (folder / SHARDS[1]).read_bytes()
    assert hub.got(SHARDS[1]) == ["", "bytes=50000-"], "the rest of it, and no more"


def test_a_download_that_fails_is_one_line_and_keeps_whole_files(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.repositories[NAME].files
    hub.repositories[NAME].files = {n: c for n, c in files.items() if n != SHARDS[1]}
    model = HubModel(NAME)
    described = description_folder(model)
    with pytest.raises(ConfigError, match=f"{NAME} has no {SHARDS[1]}"):
        fetch_weights(model, described)
    assert (described / SHARDS[0]).is_file()
    assert not is_complete(described)


def test_a_revision_is_named_as_its_users_know_it(hub: HubStandIn) -> None:
    assert model_folder(NAME, "v1") == model_folder(NAME, COMMIT)
    with pytest.raises(ConfigError, match="has no revision v2: name a branch, a tag or a commit"):
        model_folder(NAME, "v2")


def test_without_network_what_is_cached_is_used(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model_folder(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    num_asked = len(hub.asked)
    assert model_folder(NAME) == found
    assert len(hub.asked) == num_asked, "the hub is not asked"
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, and not all of acme/other is in"):
        model_folder("acme/other")


def test_a_half_downloaded_model_is_not_taken_for_a_whole_one_offline(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    description_folder(HubModel(NAME))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        model_folder(NAME)


def test_a_hub_that_is_not_there_is_one_line(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 cannot be reached.*connect and run this"):
        model_folder(NAME)


def test_a_hub_that_is_out_of_order_is_one_line(hub: HubStandIn) -> None:
    described = description_folder(HubModel(NAME))
    hub.status = 418
    with pytest.raises(ConfigError, match="answers 418; try again later"):
        remote_tensors(HubModel(NAME), described)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("acme/none", "no folder here, and no such model at http", id="unknown"),
        pytest.param("acme/private", "no such model at http.*set HF_TOKEN", id="private"),
        pytest.param("acme/gated", "is gated: accept its terms at http", id="gated"),
        pytest.param("acme/pickle", "has no model.safetensors; it has pytorch_model.bin", id="bin"),
        pytest.param("acme/empty", "there is no config.json in it", id="no model at all"),
        pytest.param("acme/strange", r"names '\.\./secret.safetensors'", id="a shard elsewhere"),
        pytest.param("acme/broken", "is no index of safetensors files", id="no index"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(name: str, words: str, hub: HubStandIn) -> None:
    files = hub.repositories[NAME].files
    config = {"config.json": files["config.json"]}
    strange = {"weight_map": {"x": "../secret.safetensors"}}
    hub.repositories |= {
        "acme/private": Repository(files, token="sesame"),
        "acme/gated": Repository(files, token="sesame", is_gated=True),
        "acme/pickle": Repository({**config, "pytorch_model.bin": b"\x80"}),
        "acme/empty": Repository({"README.md": b"nothing"}),
        "acme/strange": Repository(
            {**config, "model.safetensors.index.json": json.dumps(strange).encode()}
        ),
        "acme/broken": Repository({**config, "model.safetensors.index.json": b"[]"}),
    }
    with pytest.raises(ConfigError, match=words) as refused:
        model_folder(name)
    assert "\n" not in str(refused.value)


def test_a_token_opens_a_gated_model(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[NAME].token = "sesame"
    hub.repositories[NAME].is_gated = True
    monkeypatch.setenv("HF_TOKEN", "sesame")
    assert is_complete(model_folder(NAME))


def test_a_folder_wins_over_an_id(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert hub_model(NAME) is None
    assert model_folder(NAME) == Path(NAME)
    assert hub.asked == []
    with pytest.raises(ConfigError, match="--revision v1"):
        hub_model(NAME, "v1")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ibm-granite/granite-4.0-h-tiny", True),
        ("/models/granite", False),
        ("./models/granite", False),
        ("models/granite/", False),
        ("models/of/granite", False),
        ("granite", False),
        ("a/../b", False),
        ("a/b--c", False),
        ("https://huggingface.co/a", False),
        ("", False),
    ],
)
def test_an_id_has_an_owner_and_a_name(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
