"""The image is built of this tree, or of a wheel that lies in dist/; no docker is needed."""

from __future__ import annotations

from tests.deploy.compose_file import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text().splitlines()


def test_what_is_installed_is_this_tree_unless_an_argument_says_otherwise() -> None:
    assert "ARG FERRYMAN=.\n" in DOCKERFILE
    assert 'install --quiet --no-compile "${FERRYMAN}[s3]"' in DOCKERFILE
    assert "--build-arg FERRYMAN=./dist/" in DOCKERFILE, "its head says how"


def test_a_wheel_travels_to_the_builder() -> None:
    assert "!dist/*.whl" in IGNORED


def test_what_is_called_after_the_installation_is_no_part_of_the_tree() -> None:
    """A wheel brings the packages; of the tree only these tools are needed beside it."""
    stage = DOCKERFILE.split("FROM ${BASE}\n")[0]
    after = stage.split("${FERRYMAN}[s3]", 1)[1]
    used = {word for word in after.split() if word.startswith("/src/")}
    assert used == {
        "/src/tools/leave_out.py",
        "/src/tools/left_out.toml",
        "/src/tools/strip_libraries.py",
    }
    assert all(f"!{path.removeprefix('/src/')}" in IGNORED for path in used)


def test_the_readme_says_how_it_will_be_installed() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "pipx install ferryman" in readme
    assert "uvx ferryman up" in readme
