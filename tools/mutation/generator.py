"""Draws defects from source by a seed: the same files, number and seed give the same list."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from tools.mutation.edits import Edit, Text
from tools.mutation.equivalents import is_declaration, is_text, is_undrawn_function
from tools.mutation.operators import KINDS, EditPlace, expression_edits, statement_edits

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def drawn(sources: Mapping[str, bytes], number: int, seed: int, every: Optional) -> list[Edit]:
    """`number` edits of `sources` (path: bytes), or fewer if there are no more.

    Kinds take turns, so that the many conditions do not crowd out the few waits. No two edits are
    of one place. `every` says what calls may leave out: `optional_words` of the whole tree. An
    edit's turn depends on its own text and the seed, so other changes of the tree move few.
    """
    waiting: dict[str, list[Edit]] = {kind: [] for kind in KINDS}
    for file in sorted(sources):
        for edit in edits_of(file, sources[file], every):
            waiting[edit.kind].append(edit)
    for edits in waiting.values():
        edits.sort(key=lambda edit: _turn(edit, seed))
    chosen: dict[tuple[str, int], Edit] = {}
    while len(chosen) < number and any(waiting.values()):
        for kind in KINDS:
            if waiting[kind] and len(chosen) < number:
                edit = waiting[kind].pop()
                if _compiles(edit, sources[edit.file]):
                    chosen.setdefault((edit.file, edit.start), edit)
    return list(chosen.values())


Optional = Mapping[str, frozenset[str]]


def _turn(edit: Edit, seed: int) -> bytes:
    return blake2b(f"{seed} {edit.name}".encode(), digest_size=8).digest()


def edits_of(file: str, source: bytes, optional: Optional) -> Iterator[Edit]:
    """Every edit of one file, in the order of its text."""
    text = Text(source)
    for name, function in _functions(ast.parse(source), ""):
        if not is_undrawn_function(function):
            for statement in function.body:
                yield from _below(statement, EditPlace(file, name, text, statement, optional))


def _compiles(edit: Edit, source: bytes) -> bool:
    try:
        ast.parse(edit.planted_in(source.decode()))
    except SyntaxError:
        return False
    return True


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    """Functions and methods, but none inside another: those belong to the one around them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, FunctionNode):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, prefix)


def _below(node: ast.AST, place: EditPlace) -> Iterator[Edit]:
    """The edits of a node and of all that stands in it."""
    if isinstance(node, FunctionNode) and is_undrawn_function(node):
        return
    if isinstance(node, ast.stmt):
        if is_declaration(node):
            return
        place = EditPlace(place.file, place.function, place.text, node, place.optional)
        if not is_text(getattr(node, "value", node)):
            yield from statement_edits(node, place)
    if is_text(node) or isinstance(node, ast.arguments | ast.arg):
        return
    yield from expression_edits(node, place)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(child, place)


def optional_words(sources: Sequence[bytes]) -> dict[str, frozenset[str]]:
    """Function or class → the words that each definition of that name lets a call leave out."""
    words: dict[str, list[set[str]]] = defaultdict(list)
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                words[node.name].append(_fields_with_defaults(node))
            elif isinstance(node, FunctionNode):
                words[node.name].append(_words_with_defaults(node.args))
    return {name: frozenset(set.intersection(*each)) for name, each in words.items()}


def _words_with_defaults(args: ast.arguments) -> set[str]:
    positional = [*args.posonlyargs, *args.args]
    ending = positional[len(positional) - len(args.defaults) :] if args.defaults else []
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return {a.arg for a in ending} | {a.arg for a, default in named if default is not None}


def _fields_with_defaults(node: ast.ClassDef) -> set[str]:
    fields = {
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and field.value and isinstance(field.target, ast.Name)
    }
    for made in node.body:
        if isinstance(made, ast.FunctionDef) and made.name == "__init__":
            fields |= _words_with_defaults(made.args)
    return fields
