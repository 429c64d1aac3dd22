"""`ferryman doctor` before anything runs: seven faults of a machine and of a model folder.

The other faults are planted in a cluster: tests/system/test_doctor.py.
"""

from __future__ import annotations

import json
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_disk import small_disk

from ferryman_cli.app import run
from ferryman_launcher.options import demo_model

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model, to be spoilt."""
    return Path(shutil.copytree(demo_model(), tmp_path / "model"))


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Looks at a model folder, and at a state folder that is still to be made."""

    def look(model: Path, state_dir: Path = tmp_path / "state") -> dict[str, Any]:
        status = run(["doctor", str(model), "--state-dir", str(state_dir), "--json"])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        breaks = [f["name"] for f in report["findings"] if f["severity"] == "breaks"]
        assert status == bool(breaks)
        return report

    return look


@pytest.fixture(autouse=True)
def _any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other servers of this machine may listen at the ports that are the default."""
    for door in ("HTTP", "GRPC"):
        monkeypatch.setenv(f"FERRYMAN_{door}_PORT", "0")


def assert_found(report: dict[str, Any], name: str, *mends: str) -> None:
    """This and nothing else was found, and these words are in what mends it."""
    assert [finding["name"] for finding in report["findings"]] == [name]
    for words in mends:
        assert words in report["findings"][0]["mend"]


def test_a_sound_machine_and_folder_have_no_finding(doctor: Doctor, model: Path) -> None:
    report = doctor(model)
    assert report["findings"] == []
    assert {"limits", "disks", "secrets", "model", "ports", "memory"} <= set(report["checks"])
    assert report["left_out"][0].startswith("cluster: none runs here")


def test_a_low_limit_of_open_files(doctor: Doctor, model: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        report = doctor(model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_found(report, "open-files", "ulimit -n 65536")


def test_a_full_disk_below_the_state_folder(doctor: Doctor, model: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kibibytes=512) as disk:
        report = doctor(model, disk / "state")
    assert_found(report, "disk", f"df -h {tmp_path / 'disk'}", "--state-dir")


def test_a_full_disk_below_the_storage(
    doctor: Doctor, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", kibibytes=512) as disk:
        monkeypatch.setenv("FERRYMAN_STORAGE_DIR", str(disk))
        report = doctor(model)
    assert_found(report, "disk", "--storage-dir")


def test_memory_that_the_pools_do_not_fit_into(
    doctor: Doctor, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_MEMORY", "1300M")
    report = doctor(model)
    assert_found(report, "memory", "free memory")
    assert "the model does not fit" in report["findings"][0]["words"]


def test_a_port_that_is_taken(doctor: Doctor, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("FERRYMAN_HTTP_PORT", str(other.getsockname()[1]))
        report = doctor(model)
    assert_found(report, "port", "ss -ltnp", "--http-port 0")


def test_a_folder_without_tokenizer(doctor: Doctor, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert_found(doctor(model), "tokenizer", f"to {model}")


def test_a_folder_without_template_is_a_warning(doctor: Doctor, model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    report = doctor(model)
    assert_found(report, "template", "chat_template.jinja")
    assert report["findings"][0]["severity"] == "warns"


def test_weights_that_were_cut(doctor: Doctor, model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_found(doctor(model), "weights", "sha256sum")


def test_people_read_what_breaks_and_what_mends_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["doctor", str(model), "--state-dir", str(tmp_path / "state")]
    assert run(flags) == 0
    assert capsys.readouterr().out.startswith("not tried  cluster")
    (model / "tokenizer.json").unlink()
    assert run(flags) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("breaks  tokenizer: ")
    assert lines[1].startswith("        mend: bring tokenizer.json")
    assert lines[-1].startswith("1 that break something, 0 to know of")


def test_a_model_that_is_no_folder_is_a_finding_and_a_wrong_flag_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", "--credentials", str(tmp_path / "none.json"), "--nats", "nats://h"]) == 2
    assert "none.json" in capsys.readouterr().err
