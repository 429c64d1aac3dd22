"""`ferryman models`: the families that are read, with architectures, state and formats."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import Any

from ferryman.errors import InvalidRequest
from ferryman.gguf.architectures import names_of
from ferryman.gguf.model_file import SUFFIX, model_exists
from ferryman.model.config import family_of
from ferryman.model.families import FAMILIES, Family

INDENT = " " * 4


def run_models(word: str, *, as_json: bool) -> int:
    """Prints the families that have `word` in a name or in their sentence, all if it is empty; that
    of a model if it is the path of a folder or of a GGUF file.

    Raises InvalidRequest if there is none, and ConfigError for a model that is not read.
    """
    families = _families(word)
    if not families:
        raise InvalidRequest(f"no family has {word!r} in a name; without it all are listed")
    if as_json:
        print(json.dumps({"families": [_record(family) for family in families]}, indent=2))
    else:
        width = get_terminal_size().columns
        for family in sorted(families, key=lambda family: family.name):
            print(*_lines(family, width), sep="\n", end="\n\n")
    return 0


def _families(word: str) -> list[Family[Any]]:
    # A folder may have the name of a family: only a path with a separator is one.
    is_path = os.sep in word or word.endswith(SUFFIX)
    if is_path and not model_exists(Path(word)):
        raise InvalidRequest(f"{word} is neither a folder nor a GGUF file")
    if is_path:
        return [family_of(word)]
    return [family for family in FAMILIES if word.lower() in _text(family)]


def _text(family: Family[Any]) -> str:
    gguf = names_of(family.architectures)
    return " ".join((family.name, *family.architectures, *gguf, family.summary)).lower()


def _record(family: Family[Any]) -> dict[str, Any]:
    return {
        "family": family.name,
        "models": family.summary,
        "architectures": list(family.architectures),
        "state": [kind.value for kind in family.kinds],
        "formats": family.formats,
        "gguf": names_of(family.architectures),
        "drafts_for_itself": family.mtp is not None,
    }


def _lines(family: Family[Any], width: int) -> list[str]:
    """A family's lines: the names of its architectures, then state, formats and GGUF, then the
    sentence. Lines break between words alone: names are copied from a terminal."""
    gguf = ", ".join(names_of(family.architectures))
    facts = f"state: {', '.join(family.kinds)}; formats: {family.formats}"
    details = (f"{facts}; GGUF: {gguf}" if gguf else facts, family.summary)
    wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap("  ".join(family.architectures))
    wrapper.initial_indent = wrapper.subsequent_indent = INDENT
    return lines + [line for text in details for line in wrapper.wrap(text)]
