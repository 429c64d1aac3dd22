"""Folders that settings name: a model, and LoRA adapters as `name=DIR`, with commas between.

Adapters are one text, because it is a flag, a variable and a line of a file alike. The engine and
the router have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ferryman.gguf.absent_models import why_no_model
from ferryman.gguf.model_file import model_exists

MAX_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")


def folders_of(text: str) -> dict[str, Path]:
    """The adapters' folders by name."""
    return {name: Path(folder) for name, folder in _pairs(text)}


def lora_text(adapters: object) -> str:
    """The text for adapters given as one, or as a mapping from name to folder. Raises ValueError,
    saying what to change."""
    if isinstance(adapters, Mapping):
        pairs = [(str(name), str(folder)) for name, folder in adapters.items()]
    elif isinstance(adapters, str):
        pairs = _pairs(adapters)
    else:
        raise ValueError("it should be name=DIR, or a mapping from name to folder")
    for name, folder in pairs:
        _check(name, folder)
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"the name {twice} is given twice")
    if len(pairs) > MAX_ADAPTERS:
        raise ValueError(f"at most {MAX_ADAPTERS} adapters can be served")
    return ",".join(f"{name}={Path(folder).absolute()}" for name, folder in pairs)


def _pairs(text: str) -> list[tuple[str, str]]:
    """Name and folder of each adapter, unchecked."""
    split = (pair.partition("=") for pair in text.split(",") if pair.strip())
    return [(name.strip(), folder.strip()) for name, _, folder in split]


def _check(name: str, folder: str) -> None:
    if not _NAME.fullmatch(name) or not folder:
        raise ValueError(f"{name}={folder}: it should be name=DIR, such as kites=adapters/kites")
    if "," in folder:
        raise ValueError(f"{name}={folder}: a folder's name may hold no comma")
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"{name}={folder}: there is no adapter_config.json in it")


def _check_model(model: Path) -> Path:
    if not model_exists(model):
        raise ValueError(why_no_model(model))
    return model


LoraFolders = Annotated[str, BeforeValidator(lora_text)]
ModelFolder = Annotated[Path, AfterValidator(_check_model)]
