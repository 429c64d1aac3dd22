"""`ferryman models`, and the error that points to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gguf_models.files import write
from tools.bench.gguf.container import Setting

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import ARCHITECTURES, names_of
from ferryman.model.config import load_config
from ferryman.model.families import FAMILIES
from ferryman_cli.app import run


def test_every_architecture_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    words = capsys.readouterr().out.split()
    for family in FAMILIES:
        for name in family.architectures:
            assert words.count(name) == 1, name


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_lines_break_between_words_alone(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {word for line in lines for word in line.split()}
    for family in FAMILIES:
        assert words >= {*family.architectures, *family.summary.split()}, family.name
    # A line is longer than the terminal only if it is one name.
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


def test_a_record_says_state_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "gpt_oss", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["families"]
    assert record["architectures"] == ["GptOssForCausalLM"]
    assert (record["state"], record["formats"]) == (["full", "window"], "plain, mxfp4")
    assert record["gguf"] == ["gpt-oss"]
    assert not record["drafts_for_itself"]


def test_a_family_is_found_by_the_name_that_gguf_files_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["models", "nemotron_h_moe", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["families"]
    assert (record["family"], record["gguf"]) == ("nemotron_h", ["nemotron_h", "nemotron_h_moe"])
    read = {name for family in FAMILIES for name in names_of(family.architectures)}
    assert read == ARCHITECTURES.keys()


def test_the_family_of_a_file_is_listed_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys: dict[str, Setting] = {"general.architecture": "bert"}
    assert run(["models", str(write(tmp_path / "other.gguf", keys))]) == 2
    assert "architecture bert are not read: it does not write text" in capsys.readouterr().err
    config = {"architectures": ["ApertusForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(["models", str(tmp_path), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["families"]
    assert (record["family"], record["gguf"]) == ("apertus", ["apertus"])
    assert run(["models", str(tmp_path / "missing.gguf")]) == 2
    assert "missing.gguf is neither a folder nor a GGUF file" in capsys.readouterr().err


def test_a_word_of_no_family_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "bert"]) == 2
    assert "no family has 'bert'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(
            {"architectures": ["Qwen9ForCausalLM"]},
            [
                "Qwen9ForCausalLM is not supported",
                "Qwen/Qwen2.5-0.5B, Qwen2ForCausalLM (Qwen 2 and 2.5",
                "by its name",
                "hidden_size",
            ],
            id="an unknown one, and the field that is missed first",
        ),
        pytest.param(
            {"architectures": ["LlamaForSequenceClassification"]},
            ["only models that generate text", "LlamaForCausalLM", "ForSequenceClassification"],
            id="another task",
        ),
        pytest.param(
            {"architectures": ["Glm5NextForConditionalGeneration"]},
            ["choose groups of tokens by one key of each group"],
            id="one that is refused for its layers",
        ),
        pytest.param(
            {
                "architectures": ["NewForConditionalGeneration"],
                "text_config": {"model_type": "glm4_moe", "hidden_size": 64, "new_gate": 3},
            },
            [
                "zai-org/GLM-4.5-Air",
                "not understood are the fields new_gate",
                "num_experts_per_tok",
            ],
            id="one whose text is told by its model type",
        ),
        pytest.param(
            {"architectures": ["Zyx"]}, ["no supported one has a similar name"], id="none is near"
        ),
        pytest.param({"architectures": []}, ["architecture (none)"], id="no architecture"),
    ],
)
def test_an_unsupported_architecture_is_told_the_nearest(
    fields: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path)
    for word in (*words, f"`ferryman models` lists the {len(FAMILIES)} families"):
        assert word in str(raised.value)


def test_a_config_that_reads_as_the_nearest_is_still_refused(tmp_path: Path) -> None:
    fields = {
        "architectures": ["Llama9ForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="nobody has compared what its layers compute"):
        load_config(tmp_path)
