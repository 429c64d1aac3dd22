"""Rules about code: comments in long functions, names of local variables, queues."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from tools.house.source import Module

LONG_LINES = 25
# They say that there is something, and not what.
PRONOUNS = frozenset({"found", "each", "one", "said", "own", "known", "given", "shown", "told"})


def uncommented_functions(modules: Iterable[Module]) -> list[str]:
    """Functions with a body of LONG_LINES and more, without the docstring, that hold no comment."""
    silent = []
    for module in modules:
        long = [function for function in _functions(module) if _num_lines(function) >= LONG_LINES]
        comments = {token.start[0] for token in module.comments()} if long else set()
        for function in long:
            first, last = _body(function)
            if not comments & set(range(first, last + 1)):
                silent.append(f"{module.path}:{function.lineno} {function.name} ({last - first})")
    return silent


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from module.nodes_of(ast.FunctionDef)
    yield from module.nodes_of(ast.AsyncFunctionDef)


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, last = _body(function)
    return last - first + 1


def _body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """First and last line of a function without its docstring."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    body = function.body[1:] if has_docstring else function.body
    return body[0].lineno if body else function.lineno, function.end_lineno or function.lineno


def pronoun_locals(modules: Iterable[Module]) -> list[tuple[Module, str]]:
    """Parameters, local variables and targets of comprehensions whose name is a pronoun.

    Module, place and name; a variable counts once in a function, however often it is set.
    """
    return [
        (module, f"{module.path}:{line} {name}")
        for module in modules
        for line, name in sorted(_pronouns(module))
    ]


def _pronouns(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _variables([node.args, *node.body])
        elif isinstance(node, ast.Lambda):
            yield from _variables([node.args, node.body])
        elif isinstance(node, ast.comprehension):
            yield from _variables([node.target])


def _variables(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of what these nodes set themselves, without functions and the like inside."""
    lines: dict[str, int] = {}
    waiting = list(nodes)
    for node in waiting:  # it grows meanwhile
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                lines.setdefault(name, node.lineno)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                lines.setdefault(name, node.lineno)
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                lines.setdefault(name, node.lineno)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                pass
            case ast.comprehension():  # its targets are its own
                waiting += [node.iter, *node.ifs]
            case _:
                waiting += ast.iter_child_nodes(node)
    return ((line, name) for name, line in lines.items() if name in PRONOUNS)


def timed_simple_queues(modules: Iterable[Module]) -> list[str]:
    """Places that wait for something with a timeout in a module with a SimpleQueue.

    CPython 3.11 computes the rest of the time again after a lock that was free; below zero it waits
    for ever, and no later `put` is due. A Queue checks.
    """
    return [
        f"{module.path}:{node.lineno}"
        for module in modules
        if "SimpleQueue" in {node.attr for node in module.nodes_of(ast.Attribute)}
        for node in module.nodes_of(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and any(keyword.arg == "timeout" for keyword in node.keywords)
    ]
