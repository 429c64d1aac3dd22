"""How docs/clients.md says that an agent is set up: files to write, and commands to run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_ADDRESS = "http://127.0.0.1:8000"
_FILE = re.compile(r"In `([^`]+)`[^\n]*:\n\n```\w+\n(.*?)```", re.DOTALL)
_COMMANDS = re.compile(r"```sh\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AgentGuide:
    """An agent's section: `files` by their path, which may begin with ~, and shell `commands`."""

    files: Mapping[str, str]
    commands: str

    def write_files(self, home: Path, workspace: Path) -> None:
        """Writes the files below the user's folder, or below the folder that the agent works in."""
        for name, text in self.files.items():
            path = home / name[2:] if name.startswith("~/") else workspace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def guide_of(title: str, address: str) -> AgentGuide:
    """The section `title`, with the address of a running cluster.

    A section in a section is named by both titles, and has the files and commands that it does not
    say from the outer one. Raises ValueError without such a section, or one block of commands.
    """
    files: dict[str, str] = {}
    commands: list[str] = []
    for text in _sections(title, _PAGE.read_text().replace(_ADDRESS, address)):
        files |= dict(_FILE.findall(text))
        commands = _COMMANDS.findall(text) or commands
    if len(commands) != 1:
        raise _missing(title)
    return AgentGuide(files, commands[0])


def _sections(title: str, page: str) -> Iterator[str]:
    """The texts of a section and of the one in it, each to the next heading."""
    for depth, part in enumerate(title.split(", "), start=3):
        _, heading, rest = page.partition(f"\n{'#' * depth} {part}\n")
        if not heading:
            raise _missing(title)
        page = re.split(rf"\n#{{2,{depth}}} ", rest)[0]
        yield re.split(r"\n##+ ", page)[0]


def _missing(title: str) -> ValueError:
    return ValueError(f"docs/clients.md needs a section {title!r} with one block of commands")
