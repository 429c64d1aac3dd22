"""All fixed numbers of the product, by file: `python -m tools.constants > tests/constants.toml`.

A limit, a time or a bound that changes by mistake fails no test that reads it from the source.
So each stands a second time in that table, and `tests/tools/test_constants.py` compares the two. A
number is meant to be changed in both places by hand; this program writes the lines of new files.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("services", "shared/ferryman")
LEFT_OUT = ("wire/v1/", "ferryman_bench/", "ferryman_simulator/")
"""Generated messages, and what measures: no promise depends on a number there."""

Number = int | float
_OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}


def constants(root: Path) -> dict[str, dict[str, Number]]:
    """The numbers by file and name; files without any are left out."""
    tables: dict[str, dict[str, Number]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not any(part in name for part in LEFT_OUT):
                tables[name] = numbers_in(path.read_text())
    return {name: numbers for name, numbers in tables.items() if numbers}


def numbers_in(source: str) -> dict[str, Number]:
    """The constants of a module that are numbers, or sums and products of such."""
    numbers: dict[str, Number] = {}
    for name, value in _assigned(ast.parse(source)):
        if name.lstrip("_").isupper() and (number := _number(value, numbers)) is not None:
            numbers[name] = number
    return numbers


def _assigned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in module.body:
        match statement:
            case ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                yield name, value
            case ast.Assign([ast.Name(name)], value):
                yield name, value
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                pairs = zip(names, values, strict=True)
                yield from ((one.id, value) for one, value in pairs if isinstance(one, ast.Name))


def _number(value: ast.expr, known: Mapping[str, Number]) -> Number | None:
    match value:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(ast.USub(), operand):
            positive = _number(operand, known)
            return None if positive is None else -positive
        case ast.Name(name):
            return known.get(name)
        case ast.BinOp(left, kind, right):
            both, operation = (_number(left, known), _number(right, known)), type(kind)
            if both[0] is None or both[1] is None or operation not in _OPERATIONS:
                return None
            return _OPERATIONS[operation](both[0], both[1])
    return None


def as_toml(tables: Mapping[str, Mapping[str, Number]]) -> str:
    """The table's text."""
    parts = (
        "\n".join((f'["{name}"]', *(f"{key} = {value!r}" for key, value in numbers.items())))
        for name, numbers in tables.items()
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(as_toml(constants(ROOT)), end="")
