"""Rules about sentences of docstrings and comments, and about lines of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tools.house.source import Module

MAX_COLUMNS = 160
# A relative clause continues with a small letter or a name; a heading such as "Who | What" does
# not.
RELATIVE_OPENING = re.compile(r"(What|Whatever|Which|Whichever|Who|Whoever|Whose)\s+[a-z`]")
RELATIVE_WORD = re.compile(r"\b(What|Which|Who)")
# Words before a subject, or in place of one.
BARE_OPENING = re.compile(r"(Of|As|Those|That|How|Why|Where|When|Until|From|By|Behind|Beside)\b")


def relative_openings(modules: Iterable[Module]) -> list[str]:
    """Sentences of docstrings and comments that begin with a relative clause: place and text.

    A question may begin with the same words.
    """
    return [
        f"{module.path}:{line} {sentence}"
        for module in modules
        if RELATIVE_WORD.search(module.text)  # comments of all modules take seconds
        for line, text in sorted([*module.docstrings, *module.comment_blocks])
        for sentence in _sentences(text)
        if RELATIVE_OPENING.match(sentence) and not sentence.endswith("?")
    ]


def bare_openings(modules: Iterable[Module]) -> list[tuple[Module, str]]:
    """Docstrings whose first sentence begins without a subject: module, place and sentence."""
    return [
        (module, f"{module.path}:{line} {sentence}")
        for module in modules
        for line, text in module.docstrings
        if BARE_OPENING.match(text.lstrip("\n"))
        for sentence in [next(_sentences(text.lstrip("\n")))]
        if not sentence.endswith("?")
    ]


def _sentences(text: str) -> Iterator[str]:
    """The sentences of every paragraph. Indented lines are formulas or tables, and divide it."""
    lines = ["" if line.startswith(" ") else line for line in text.splitlines()]
    for paragraph in re.split(r"\n{2,}", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def long_lines(root: Path) -> Mapping[str, int]:
    """Pages of Markdown below `root` and how many of their lines are too long, if any are.

    Hidden folders, such as an environment of Python, are left out.
    """
    counts = {}
    for top in root.iterdir():
        if not top.name.startswith("."):
            for path in [top] if top.suffix == ".md" else top.rglob("*.md"):
                lines = path.read_text().splitlines()
                counts[str(path.relative_to(root))] = sum(len(line) > MAX_COLUMNS for line in lines)
    return {page: count for page, count in counts.items() if count}
