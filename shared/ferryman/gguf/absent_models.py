"""The reasons why a path names no model, and what to name for it."""

from __future__ import annotations

import difflib
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import SUFFIX, is_head, model_files, model_name

_LIKENESS = 0.6
"""The least likeness of a name that is offered for another, of 1 for the same."""


def why_no_model(path: Path) -> str:
    """The reason why `path` is neither a folder nor a GGUF file, with the nearest name beside it.

    The caller has seen that it is neither.
    """
    if path.is_file():
        return f"it is a file whose name does not end in {SUFFIX}, as that of a GGUF file does"
    missing = "there is no such folder, and no such GGUF file"
    models = _models_in(path.parent)
    names = {name.lower(): model for model in models for name in (model.name, model_name(model))}
    near = difflib.get_close_matches(path.name.lower(), names, 1, _LIKENESS)
    if near:
        return f"{missing}; the nearest is {names[near[0]]}"
    return f"{missing}; name one, or a model on the hub as owner/name"


def why_no_config(folder: Path) -> str:
    """The reason why a folder without a config is no model, with a GGUF file in it to name."""
    missing = "there is no config.json in it"
    files = [file for file in _models_in(folder) if file.is_file()]
    if not files:
        return f"{missing}; name a folder that has one, or a GGUF file"
    return f"{missing}; name one of its GGUF files, such as {files[0]}"


def _models_in(folder: Path) -> list[Path]:
    """The folders and the GGUF files in a folder that can be read, by name; of shards the first."""
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return []
    files = [path for path in inside if path.suffix == SUFFIX and not is_head(path)]
    firsts = [path for path in files if not _is_later_shard(path)]
    return [*firsts, *(path for path in inside if path.is_dir())]


def _is_later_shard(file: Path) -> bool:
    try:
        return model_files(file)[0] != file
    except ConfigError:
        return True
