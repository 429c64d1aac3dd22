"""`--model` with the id of a model on the hub: what fits is told before its weights are here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.stand_in import COMMIT, HubStandIn, hub_stand_in, point_client_at, repository_of

from ferryman.llm import LLM
from ferryman.schedule.request import SamplingParams
from ferryman_cli.app import run
from ferryman_launcher.checks.model_places import locate
from ferryman_launcher.options import demo_model, up_options, up_sources

NAME = "acme/kites"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub that has the demo model, and nothing of it here."""
    with hub_stand_in() as stand_in:
        point_client_at(stand_in, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        stand_in.repositories[NAME] = repository_of(demo_model())
        yield stand_in


def test_fit_reads_headers_and_downloads_no_weights(
    hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", NAME, "--memory", "2G", "--json"]) == 0
    of_id = json.loads(capsys.readouterr().out)
    assert [span.partition("=")[0] for span in hub.got(WEIGHTS)] == ["bytes"]
    assert not list(tmp_path.rglob(WEIGHTS))
    assert run(["fit", str(demo_model()), "--memory", "2G", "--json"]) == 0
    of_folder = json.loads(capsys.readouterr().out)
    assert of_id["workers"] == of_folder["workers"]
    assert of_id["stored_bytes"] == of_folder["stored_bytes"]


def test_up_refuses_before_a_byte_of_weights_is_downloaded(
    hub: HubStandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--http-port", "0", "--grpc-port", "0", "--memory", "300M"]
    assert run(["up", "--model", NAME, *flags]) == 2
    assert "and --memory leaves 300M" in capsys.readouterr().err
    assert not list(tmp_path.rglob(WEIGHTS))


def test_config_says_where_the_folder_comes_from(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "--show", "--model", NAME, "--revision", "v1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    model = next(line for line in lines if line.startswith("model = "))
    assert COMMIT in model
    assert model.endswith(f"# derived of {NAME} at v1")


def test_a_model_is_served_under_its_id_unless_it_is_called_otherwise(hub: HubStandIn) -> None:
    sources, places = locate(up_sources({"model": NAME}, {}))
    assert up_options(sources).served_name == NAME
    assert list(places.snapshots) == [up_options(sources).engine.model]
    sources, _ = locate(up_sources({"model": NAME, "served_name": "kites"}, {}))
    assert up_options(sources).served_name == "kites"


def test_a_draft_model_may_be_an_id_as_well(hub: HubStandIn) -> None:
    sources, places = locate(up_sources({"draft": NAME}, {}))
    options = up_options(sources)
    assert Path(options.engine.draft_model) in places.snapshots
    assert options.engine.model == demo_model()


def test_a_folder_of_the_same_name_is_said_to_win(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    _, places = locate(up_sources({"model": NAME}, {}))
    assert places.notes == (f"{NAME} is a folder here, which counts before a model of this id",)
    assert hub.asked == []


def test_the_offline_engine_takes_an_id(hub: HubStandIn) -> None:
    prompt = "story The red kite is in Oslo.\nQuestion: Where is the red kite?\nAnswer:"
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    answers = []
    for model in (NAME, str(demo_model())):
        options = {"dtype": "float32", "page_size": 16, "memory_bytes": 64 << 20}
        with LLM(model, **options, num_threads=1) as llm:
            answers.append(llm.generate(prompt, sampling)[0].text)
    assert answers[0] == answers[1] != ""
    assert hub.got(WEIGHTS) == [""]


@pytest.mark.parametrize("command", ["up", "fit", "config"])
def test_an_unknown_id_is_one_line(
    command: str, hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--model", "acme/none"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: acme/none: no folder here, and no such model at http")
    assert said.count("\n") == 1
