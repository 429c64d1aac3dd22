"""The table of bits, and the first kernel at which a way parts from the cold run.

    python -m tools.bits                                   the nine tiny families, all ways
    python -m tools.bits --models llama,bamba --ways chunks-32,hit-last --dtypes bfloat16
    python -m tools.bits --models wide,smollm2 --json
    python -m tools.bits cluster --models bamba --ways nixl,storage    through a real cluster
    python -m tools.bits where --model bamba --dtype float32 --way chunks-48

Exit status 1 if an answer that was tried differs by a bit, or if a way that the model could have
taken was never taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence

import transformers
from tools.bits.cluster.columns import served_cells
from tools.bits.cluster.ways import SERVED_WAYS
from tools.bits.divergence import POINTED, pointed
from tools.bits.measured_engine import DTYPES
from tools.bits.step_record import recorded_steps
from tools.bits.table import BitsCell, as_text, as_values, measured_cells
from tools.bits.ways import WAYS

from tools.bits import models


def table_parser(command: str, ways: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a table with some of these ways."""
    known = list(ways)
    options = argparse.ArgumentParser(
        prog=command,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument(
        "--models",
        type=_models,
        default="families",
        help="names with commas; families, wide and smollm2 stand for groups",
    )
    options.add_argument("--dtypes", type=_some_of(DTYPES), default=",".join(DTYPES))
    options.add_argument("--ways", type=_some_of(known), default=",".join(known))
    options.add_argument("--prompts", type=_up_to(models.MAX_PROMPTS), default=6, metavar="N")
    options.add_argument("--tokens", type=int, default=24, metavar="N", help="of each answer")
    options.add_argument("--json", action="store_true", help="cells as JSON in place of text")
    return options


def _models(names: str) -> list[str]:
    try:
        return models.named(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The reader of a list of names with commas."""
    possible = list(known)

    def read(names: str) -> list[str]:
        chosen = names.split(",")
        if unknown := [name for name in chosen if name not in possible]:
            message = f"no {', '.join(unknown)}; there are {', '.join(possible)}"
            raise argparse.ArgumentTypeError(message)
        return chosen

    return read


def _up_to(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text)
        if not 1 <= number <= most:
            raise argparse.ArgumentTypeError(f"should be 1 to {most}")
        return number

    return read


def show_table(arguments: Sequence[str]) -> int:
    """The ways inside one process."""
    parser = table_parser("python -m tools.bits", WAYS)
    parser.add_argument("--device", default="cpu", help="cuda: on a card, under exactness bits")
    options = parser.parse_args(arguments)
    ways = [WAYS[name] for name in options.ways]
    with recorded_steps() as record:
        cells = measured_cells(
            options.models, options.dtypes, ways, record, **_size(options), device=options.device
        )
        return _show(options, cells)


def show_cluster_table(arguments: Sequence[str]) -> int:
    """The ways through the processes of a cluster."""
    options = table_parser("python -m tools.bits cluster", SERVED_WAYS).parse_args(arguments)
    ways = [SERVED_WAYS[name] for name in options.ways]
    return _show(options, served_cells(options.models, options.dtypes, ways, **_size(options)))


def _size(options: argparse.Namespace) -> dict[str, int]:
    return {"num_prompts": options.prompts, "num_tokens": options.tokens}


def _show(options: argparse.Namespace, measured: Iterable[BitsCell]) -> int:
    """Prints cells; each is told on the error stream when it is there. The exit status."""
    cells: list[BitsCell] = []
    for cell in measured:
        cells.append(cell)
        print(cell.model, cell.dtype, cell.way, cell.text, file=sys.stderr, flush=True)
    print(json.dumps(as_values(cells), indent=1) if options.json else as_text(cells))
    return int(not all(cell.is_exact for cell in cells))


def where_parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m tools.bits where",
        description="The first position, layer, part and kernel at which a way parts from the cold "
        "run, driven layer by layer without an engine.",
    )
    options.add_argument("--model", type=_models, required=True, metavar="NAME")
    options.add_argument("--dtype", choices=DTYPES, required=True)
    options.add_argument("--way", choices=POINTED, required=True)
    options.add_argument("--prompts", type=_up_to(models.MAX_PROMPTS), default=6, metavar="N")
    options.add_argument("--tokens", type=int, default=24, metavar="N", help="of each answer")
    return options


def show_divergence(arguments: Sequence[str]) -> int:
    options = where_parser().parse_args(arguments)
    for name in options.model:
        with models.saved_model(name, options.prompts) as model:
            text = pointed(model, options.dtype, options.way, options.tokens)
            print(f"{name} {options.dtype} {options.way}: {text}")
    return 0


def main(arguments: Sequence[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    commands = {"where": show_divergence, "cluster": show_cluster_table}
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return show_table(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
