"""How docs/clients.md says that an agent is set up: files to write, and commands to run."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """The section `title`, with the address of a running cluster. Raises ValueError without one."""
    _, heading, rest = _PAGE.read_text().partition(f"\n### {title}\n")
    section = re.split(r"\n##+ ", rest)[0].replace(_ADDRESS, address)
    commands = _COMMANDS.findall(section)
    if not heading or len(commands) != 1:
        raise ValueError(f"docs/clients.md needs a section {title!r} with one block of commands")
    return AgentGuide(dict(_FILE.findall(section)), commands[0])
