"""The architectures of llama.cpp's converter that Ferryman refuses, each with what it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ferryman.errors import ConfigError
from ferryman.gguf.architectures import ARCHITECTURES, config_of
from ferryman.gguf.model_file import GgufFile, GgufMetadata

CONSTANTS = Path("gguf-py") / "gguf" / "constants.py"
_TABLE = re.compile(r"MODEL_ARCH_NAMES[^{]*\{(.*?)\n\}", re.DOTALL)
_NAME = re.compile(r':\s*"([^"]+)"')


def known_names(tree: Path) -> list[str]:
    """The names of architectures in the converter's table."""
    table = _TABLE.search((tree / CONSTANTS).read_text())
    return _NAME.findall(table[1]) if table else []


def refusals(tree: Path) -> Iterator[str]:
    """A name and the reason, of each architecture without a reader."""
    for name in known_names(tree):
        if name not in ARCHITECTURES:
            yield f"{name}: {reason(name)}"


def reason(architecture: str) -> str:
    """The words of the refusal of a file of this architecture."""
    metadata = GgufMetadata(Path("model.gguf"), {"general.architecture": architecture})
    try:
        config_of(GgufFile(metadata, {}, {}))
    except ConfigError as error:
        text = str(error).partition("are not read")[2]
        return text.partition(". Read are")[0].strip(":; ")
    return "it is read"
