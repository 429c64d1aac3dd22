"""`ferryman models`: the families that are read, with architectures, state and formats."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ferryman.errors import InvalidRequest
from ferryman.gguf.architectures import names_of
from ferryman.model.families import FAMILIES, Family


def run_models(word: str, *, as_json: bool) -> int:
    """Prints the families that have `word` in a name or in their sentence, all if it is empty.

    Raises InvalidRequest if there is none.
    """
    families = [family for family in FAMILIES if word.lower() in _text(family)]
    if not families:
        raise InvalidRequest(f"no family has {word!r} in a name; without it all are listed")
    if as_json:
        print(json.dumps({"families": [_record(family) for family in families]}, indent=2))
    else:
        Console(highlight=False).print(_table(families))
    return 0


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


def _table(families: Iterable[Family[Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("architecture", "state", "formats", "GGUF", "models"):
        # Names are copied from a terminal: they are never cut, the sentence wraps.
        table.add_column(head, no_wrap=head == "architecture", overflow="fold")
    for family in sorted(families, key=lambda family: family.name):
        table.add_row(
            "\n".join(family.architectures),
            ", ".join(family.kinds),
            family.formats,
            ", ".join(names_of(family.architectures)),
            family.summary,
        )
    return table
