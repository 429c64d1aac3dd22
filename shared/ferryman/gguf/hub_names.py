"""Names of GGUF files on the hub, as users of llama.cpp and vLLM write them.

owner/name:FILE.gguf        a file of the repository; of shards the first
owner/name/FILE.gguf        the same, maybe in a folder of it
owner/name:Q4_K_M           the file whose name ends with this type
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import SUFFIX, model_files

_NAME = re.compile(
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"(?::(?P<wanted>[A-Za-z0-9][A-Za-z0-9._/-]*)|/(?P<file>[A-Za-z0-9][A-Za-z0-9._/-]*\.gguf))"
)
_SHOWN = 6


def split_name(name: str) -> tuple[str, str] | None:
    """The id of a repository, and the file or the type that is wanted of it; None for a name of
    another form."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        return None
    return match["id"], match["wanted"] or match["file"]


def chosen_file(names: Sequence[str], wanted: str) -> str:
    """The file of a repository, whose files are `names`, that is wanted: of shards the first.

    Raises ConfigError, with the files that there are, if none or several are meant.
    """
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if wanted in files:
        return wanted
    ending = re.compile(
        rf"(?:.*[-._/])?{re.escape(wanted)}(?:-00001-of-\d{{5}})?{re.escape(SUFFIX)}", re.IGNORECASE
    )
    matches = [file for file in files if ending.fullmatch(file)]
    if len(matches) == 1:
        return matches[0]
    why = "is none of its GGUF files" if not matches else "is the ending of several files"
    among = matches or files
    listed = ", ".join(among[:_SHOWN]) + (", …" if len(among) > _SHOWN else "")
    raise ConfigError(
        f"{wanted!r} {why}; name one of {listed or 'another repository, it has none'}"
    )


def shards_of(file: str) -> tuple[str, ...]:
    """The names of a file and of the shards after it. Raises ConfigError for a later shard."""
    within = PurePosixPath(file)
    return tuple(str(within.with_name(shard.name)) for shard in model_files(Path(within.name)))
