"""GGUF files on the hub by their name, with the hub's own client against a local stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gguf_models.conversion import write_converted
from tests.gguf_models.files import write
from tests.hub.stand_in import COMMIT, HubStandIn, Repository, hub_stand_in, point_client_at
from tests.tiny_models import save_random
from tools.bench.gguf.container import Setting
from transformers import LlamaConfig

from ferryman.errors import ConfigError
from ferryman.gguf.hub_names import chosen_file, split_name
from ferryman.hub.client import HubModel
from ferryman.hub.models import hub_model, is_complete, is_hub_id, model_folder
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.settings.sources import GivenValue, Origin, Source, Sources
from ferryman_launcher.checks.model_places import locate

NAME = "acme/tiny-GGUF"
FILES = ("tiny-Q8_0.gguf", "tiny-F32.gguf", "more/tiny-Q4_K_M-00001-of-00002.gguf")
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny model in one file."""
    folder = tmp_path_factory.mktemp("model")
    save_random(folder / "folder", CONFIG, seed=1)
    return write_converted(folder / "folder", folder / "tiny.gguf", "llama").read_bytes()


@pytest.fixture
def hub(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub with the model in one file, and another one in two shards."""
    empty: dict[str, Setting] = {"general.architecture": "llama", "split.count": 2}
    second = write(tmp_path / "second.gguf", empty).read_bytes()
    later = FILES[2].replace("00001-of", "00002-of")
    with hub_stand_in() as stand_in:
        point_client_at(stand_in, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        files = {FILES[0]: content, FILES[1]: content, FILES[2]: content, later: second}
        stand_in.repositories[NAME] = Repository({**files, "README.md": b"a model"})
        yield stand_in


@pytest.mark.parametrize(
    "name", [f"{NAME}:{FILES[0]}", f"{NAME}/{FILES[0]}", f"{NAME}:Q8_0", f"{NAME}:q8_0"]
)
def test_a_file_is_downloaded_by_its_name_or_its_type(
    hub: HubStandIn, content: bytes, name: str
) -> None:
    file = model_folder(name)
    assert (file.name, file.parent.name) == (FILES[0], COMMIT)
    assert file.read_bytes() == content
    assert open_gguf(file).tensors
    assert is_complete(file)
    assert not hub.got(FILES[1]), "no other file is wanted"


def test_a_cluster_gets_the_file_and_the_name_that_was_asked(hub: HubStandIn) -> None:
    asked = f"{NAME}:F32"
    sources = Sources((Source({("", "model"): GivenValue(asked, Origin.FLAG, "")}),))
    found, places = locate(sources)
    model, served = (found.find("", name) for name in ("model", "served_name"))
    assert model is not None
    assert served is not None
    assert (Path(str(model.value)).name, served.value) == (FILES[1], asked)
    assert not list(places.missing())


def test_shards_are_downloaded_with_the_first(hub: HubStandIn) -> None:
    file = model_folder(f"{NAME}:Q4_K_M")
    assert file.name == Path(FILES[2]).name
    assert sorted(path.name for path in file.parent.iterdir()) == [
        "tiny-Q4_K_M-00001-of-00002.gguf",
        "tiny-Q4_K_M-00002-of-00002.gguf",
    ]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("Q5_K_M", r"acme/tiny-GGUF:Q5_K_M: 'Q5_K_M' is none of its GGUF files; name one of more/"),
        ("none.gguf", r"'none.gguf' is none of its GGUF files"),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_those_that_are(
    hub: HubStandIn, wanted: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        model_folder(f"{NAME}:{wanted}")


def test_a_type_that_several_files_end_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"several files; name one of a-Q8_0.gguf, b-Q8_0.gguf"):
        chosen_file(["b-Q8_0.gguf", "a-Q8_0.gguf", "a-IQ8_0.gguf"], "Q8_0")


def test_a_file_here_counts_before_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / FILES[0]).write_bytes(b"GGUF")
    assert hub_model(f"{NAME}/{FILES[0]}") is None
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b:Q4_K_M", ("a/b", "Q4_K_M")),
        ("a/b:dir/c.gguf", ("a/b", "dir/c.gguf")),
        ("a/b/dir/c.gguf", ("a/b", "dir/c.gguf")),
        ("a/b", None),
        ("./a/b/c.gguf", None),
        ("/a/b/c.gguf", None),
        ("a/b:../c.gguf", None),
        ("a/b/c", None),
    ],
)
def test_a_name_is_an_id_and_what_is_wanted_of_it(
    name: str, expected: tuple[str, str] | None
) -> None:
    assert split_name(name) == expected
    assert is_hub_id(name) is (expected is not None or name == "a/b")
    if expected:
        assert str(HubModel(*(expected[0], "v1", expected[1]))) == f"{':'.join(expected)} at v1"
