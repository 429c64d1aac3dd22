"""House rules that a machine can check: names, sizes, comments, sentences. Prints violations.

python tools/house_rules.py                 all rules
python tools/house_rules.py --uncommented   functions of 25 lines and more without a comment
python tools/house_rules.py --relative      sentences that begin with a relative clause
python tools/house_rules.py --openings      docstrings that begin without a subject
python tools/house_rules.py --locals        local variables named by a pronoun
python tools/house_rules.py --ratchets      today's numbers, as tools/house/ratchets.toml has them
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a plain script

from tools.house import code, modules, ratchets, sentences
from tools.house.source import EVERYWHERE, Module, parsed


def parser() -> argparse.ArgumentParser:
    """The command line: no option, or one."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    lists = options.add_mutually_exclusive_group()
    for name, meaning in {
        "uncommented": "list functions of 25 lines and more without a comment",
        "relative": "list sentences that begin with a relative clause",
        "openings": "list docstrings that begin without a subject",
        "locals": "list local variables named by a pronoun",
        "ratchets": "print today's numbers, as tools/house/ratchets.toml has them",
    }.items():
        lists.add_argument(f"--{name}", action="store_const", dest="list", const=name, help=meaning)
    return options


def violations(every: Sequence[Module]) -> list[str]:
    """All that a rule forbids, a line each."""
    sources = [module for module in every if module.is_source]
    classes, lonely = modules.repeated_classes(every), modules.lonely_files(sources)
    queues = code.timed_simple_queues(sources)
    return [
        *(f"class {name}: {', '.join(places)}" for name, places in classes.items()),
        *(f"module {path}: no noun of the field" for path in modules.odd_module_names(sources)),
        *(f"module {name}: imports in a circle" for name in modules.import_circles(sources)),
        *(
            f"module {path}: imports tools or tests, which are not installed"
            for path in modules.imports_of_developers(sources)
        ),
        *(f"{place}: a SimpleQueue must not wait with a timeout" for place in queues),
        *(f"file {path}: belongs to {importer}" for path, importer in lonely.items()),
        *ratchets.breaches(ratchets.counted(every), ratchets.listed()),
    ]


def main() -> int:
    wanted = parser().parse_args().list
    every = parsed(EVERYWHERE)
    sources = [module for module in every if module.is_source]
    match wanted:
        case "uncommented":
            lines = code.uncommented_functions(sources)
        case "relative":
            lines = sentences.relative_openings(every)
        case "openings":
            lines = [place for _, place in sentences.bare_openings(sources)]
        case "locals":
            lines = [place for _, place in code.pronoun_locals(sources)]
        case "ratchets":
            lines = [ratchets.written(ratchets.counted(every))]
        case _:
            lines = violations(every)
    print("\n".join(lines))
    return int(wanted is None and bool(lines))


if __name__ == "__main__":
    sys.exit(main())
