"""The images that compose.yaml names and does not build: pulled, or stand-ins made from Debian."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.compose.container_engine import ContainerEngine, NoEngineError

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
BASE, NATS, REDIS = "python:3.11-slim", "nats:2-alpine", "redis:7-alpine"
PROMETHEUS = "prom/prometheus:v3.7.3"
SERVERS = {"nats": NATS, "redis": REDIS, "prometheus": PROMETHEUS}
SUITE = "bookworm"  # its Python is 3.11
# What Debian's slim images leave out: manuals, and languages; texts of licences stay.
NOT_IN_SLIM = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
PIP_OPTION = re.compile(r"^(?:\S+)\.([\w-]+)='(.*)'$", re.MULTILINE)


def prepare_images(engine: ContainerEngine, folder: Path) -> None:
    """Gives the engine all these images. `folder` is for files. Raises NoEngineError."""
    if not engine.private:
        for name in (BASE, *SERVERS.values()):
            if (
                engine.run("image", "inspect", name).returncode
                and engine.run("pull", name).returncode
            ):
                raise NoEngineError(f"the image {name} is not here, and cannot be pulled")
        return
    if shutil.which("debootstrap") is None:
        raise NoEngineError("there is no debootstrap to make a base image with")
    _import_debian(engine, folder / "debian")
    for target, name in SERVERS.items():
        more = ("--network", "host", "--build-arg", f"BASE={BASE}", "--target", target)
        engine.output("build", "--quiet", *more, "--tag", name, str(STAND_INS))


def _import_debian(engine: ContainerEngine, root: Path) -> None:
    needed = "--include=python3,python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", needed, SUITE, str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise NoEngineError(f"debootstrap fails: {made.stdout[-500:]} {made.stderr[-500:]}")
    for leftover in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / leftover)
    _slim(root / "usr" / "share")
    archive = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    shutil.rmtree(root)
    engine.output("import", str(archive), BASE)
    archive.unlink()


def _slim(shared: Path) -> None:
    for path in [path for name in NOT_IN_SLIM for path in (shared / name).rglob("*")]:
        if path.name != "copyright" and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def fill_wheels(engine: ContainerEngine, tree: Path) -> None:
    """`make wheels` in a copy of the tree, with pip set up as it is on this machine."""
    options = pip_options()
    words = ["--network=host"]
    words += [f"--env={name}={value}" for name, value in options.items()]
    words += [f"--volume={place}:{place}:ro" for place in sorted(_places(options))]
    more = " ".join(f"'{word}'" for word in words)
    made = subprocess.run(
        ["make", "wheels", f"ARGS={more}"],
        cwd=tree,
        env=dict(engine.environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


def pip_options() -> Mapping[str, str]:
    """The options of this machine's pip, as variables."""
    said = subprocess.run(
        ["python3", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    return {
        f"PIP_{option.upper().replace('-', '_')}": value.replace("\\n", " ")
        for option, value in PIP_OPTION.findall(said)
    }


def _places(options: Mapping[str, str]) -> set[str]:
    """Files and folders that the options name; of an index the folder around it, too."""
    words = " ".join(options.values()).split()
    paths = {Path(word) for word in words}
    paths |= {Path(word.removeprefix("file://")).parent for word in words if word[:7] == "file://"}
    return {str(path) for path in paths if path.is_absolute() and path.exists()}
