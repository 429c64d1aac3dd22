"""A path that names no model is refused with what to name for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.gguf_models.files import floats, write

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import read_model
from ferryman_launcher.options import check_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("small-Q4_K_M.gguf", "large-00001-of-00002.gguf", "large-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "SmolLM2-135M").mkdir()
    (tmp_path / "model.bin").touch()
    return tmp_path


VALUES = np.zeros((2, 32), np.float32)
NAMES = {
    "another type": ("small-Q4_0.gguf", r"no such GGUF file; the nearest is .*small-Q4_K_M\.gguf$"),
    "no ending": ("small-Q4_K_M", r"the nearest is .*small-Q4_K_M\.gguf$"),
    "a folder": ("smollm2-135m-it", r"the nearest is .*SmolLM2-135M$"),
    "shards": ("large.gguf", r"the nearest is .*large-00001-of-00002\.gguf$"),
    "nothing like it": ("xyz", r"name one, or a model on the hub as owner/name$"),
    "no parent": ("away/xyz.gguf", r"name one, or a model on the hub as owner/name$"),
    "another ending": ("model.bin", r"a file whose name does not end in \.gguf"),
    "files within": (
        ".",
        r"no config\.json in it; name one of its GGUF files, such as .*large-00001",
    ),
    "nothing within": ("SmolLM2-135M", r"name a folder that has one, or a GGUF file$"),
}


@pytest.mark.parametrize("case", NAMES)
def test_the_refusal_says_what_to_name(case: str, folder: Path) -> None:
    name, message = NAMES[case]
    with pytest.raises(ConfigError, match=message):
        check_model_folder(folder / name)


def test_an_empty_file_and_a_pointer_of_git_lfs_are_told_from_other_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Q4_K_M\.gguf is empty; complete the download"):
        read_model(folder / "small-Q4_K_M.gguf")
    pointer = folder / "small-Q4_K_M.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match="a pointer of Git LFS; fetch the file with `git lfs"):
        read_model(pointer)
    pointer.write_text("<html>404</html>")
    with pytest.raises(ConfigError, match="not begin with GGUF; name another, or download"):
        read_model(pointer)


def test_a_file_that_ends_within_its_head_is_to_be_completed(tmp_path: Path) -> None:
    file = write(tmp_path / "cut.gguf", {"general.architecture": "llama"}, [floats("a", VALUES)])
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"ends after 40 bytes, .*; complete the download"):
        read_model(file)
