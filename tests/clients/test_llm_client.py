"""The command line `llm` and its Python API against a running cluster."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from tests.clients.page import SUM, block

llm = pytest.importorskip("llm", reason="the extra `clients` has it")

STORY = "The red kite is in Oslo.\nWhere is the red kite?"
ANSWER = "The red kite is in Oslo."
FUNCTION = """
def find(thing: str) -> str:
    "Find a thing"
    return f"The {thing} is in Oslo."
"""


class KiteColour(BaseModel):
    """A kite that the model describes, and nothing more."""

    model_config = ConfigDict(extra="forbid")

    is_red: bool


@pytest.fixture(scope="module")
def user_path(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which `llm` knows the server."""
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(block("llm", "yaml", base_url))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(folder))
        yield folder


@pytest.fixture
def model(user_path: Path) -> Any:
    return llm.get_model("ferryman")


def _said(*words: str) -> str:
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_says_how_it_is_set_up_and_a_conversation_goes_on(
    base_url: str, user_path: Path
) -> None:
    """The last words of a conversation are found by `-c`, in the logs of the folder."""
    name, *words = shlex.split(block("llm", "sh", base_url))
    assert (name, _said(*words)) == ("llm", SUM)
    assert _said("-c", STORY) == ANSWER


def test_the_command_line_calls_a_function(user_path: Path) -> None:
    asked = ("-m", "ferryman", "--functions", FUNCTION, "Where is the red kite?")
    assert _said(*asked, "-o", "temperature", "0") == ANSWER


def test_the_command_line_fills_a_schema(user_path: Path) -> None:
    schema = json.dumps(KiteColour.model_json_schema())
    said = _said("-m", "ferryman", "--no-stream", "--schema", schema, STORY)
    assert isinstance(json.loads(said)["is_red"], bool)


def test_an_answer_comes_in_pieces(model: Any) -> None:
    pieces = list(model.prompt(STORY, temperature=0))
    assert len(pieces) > 2
    assert "".join(pieces) == ANSWER


async def test_an_answer_comes_to_a_coroutine(user_path: Path) -> None:
    response = llm.get_async_model("ferryman").prompt(STORY, temperature=0)
    assert await response.text() == ANSWER
    assert (await response.usage()).output == 8


def test_a_chain_calls_its_tool_and_answers(model: Any) -> None:
    asked: list[str] = []

    def find(thing: str) -> str:
        """Find a thing."""
        asked.append(thing)
        return ANSWER

    assert model.chain("Where is the red kite?", tools=[find]).text() == ANSWER
    assert asked == ["red kite"]


def test_a_conversation_knows_what_was_said(model: Any) -> None:
    conversation = model.conversation()
    assert conversation.prompt(STORY).text() == ANSWER
    assert conversation.prompt("Where is the red kite?").text() == ANSWER


def test_an_answer_has_the_form_of_a_class(model: Any) -> None:
    said = model.prompt(STORY, schema=KiteColour, stream=False).text()
    KiteColour.model_validate_json(said)
