"""Rules for what is not drawn: a change there changes no answer, or only what a person reads.

- Texts: logs, warnings, what is raised or asserted, formatted strings, `__repr__` and `__str__`,
  and the arguments that name or describe something (`help`, `name`, `description` …).
- Pace: sleeps, collections of garbage, numbers of threads, priorities of processes.
- The very instant: `<` for `<=` between two readings of a clock.
- Constant limits of what is shown: a slice that ends at a named constant, or at 16 or more.
- Declarations: what only a type checker reads, and code that a compiler of loops has taken.
"""

from __future__ import annotations

import ast

LOGS = {"log", "logger", "logging", "warnings", "_log"}
PACE = {
    "sleep", "collect", "freeze", "unfreeze", "set_threshold", "nice", "set_num_threads",
    "set_num_interop_threads", "setpriority", "setproctitle", "set_name",
}  # fmt: skip
WORDS = {
    "help", "name", "description", "documentation", "doc", "metavar", "title", "message", "reason",
    "exc_info", "stacklevel", "extra", "rich_help_panel", "daemon", "thread_name_prefix", "slots",
    "frozen", "style", "hint", "detail", "epilog", "strict", "encoding",
}  # fmt: skip
READ_BY_PEOPLE = {"__repr__", "__str__", "__rich__"}
CLOCK = ("now", "seconds", "deadline", "expires", "monotonic", "time", "until", "_at", "since")
COMPILED = {"njit", "jit", "compiled", "vectorize", "overload", "guvectorize", "loop", "intrinsic"}
SHOWN = 16


def last_name(node: ast.expr) -> str:
    """The last word of a name or attribute, or of a called one."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def first_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def is_text(node: ast.AST) -> bool:
    """True for what is written for people, with all below it."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return True
    return isinstance(node, ast.Call) and first_name(node.func) in LOGS


def is_pace(call: ast.Call) -> bool:
    return last_name(call.func) in PACE


def is_undrawn_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {last_name(decorator) for decorator in node.decorator_list}
    return node.name in READ_BY_PEOPLE or bool(names & COMPILED)


def is_declaration(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def compares_instants(node: ast.Compare) -> bool:
    """True if a side is a time: whether it has come is never asked at the very instant."""
    words = [
        word.id if isinstance(word, ast.Name) else word.attr
        for word in ast.walk(node)
        if isinstance(word, ast.Name | ast.Attribute)
    ]
    return any(word.endswith(ending) for word in words for ending in CLOCK)


def is_shown_length(bound: ast.expr) -> bool:
    if last_name(bound).isupper():
        return True
    is_number = isinstance(bound, ast.Constant) and isinstance(bound.value, int)
    return is_number and bound.value >= SHOWN  # type: ignore[attr-defined]
