"""Traces for the simulator of the sessions of real agents.

    python -m tools.campaigns.agent_traces /tmp/agents.jsonl
    ferryman simulate --trace /tmp/agents.jsonl --block-tokens 16 --sweep forks=on,off

`tests/router/agents` has the bodies that unmodified clients sent, in the order of a session,
without their prose. Words of our own stand for it, so many that prompts have 1.5 to 19 thousand
tokens, as the clients' have. The router's own readers make prompts of them, with the places at
which it has state kept. Several people use each agent, in several folders: a session has its own
question, and the folder's name stands in what the agent says of its surroundings. Some people ask
again with other words.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ferryman.text.chat_beginnings import common_length
from ferryman.text.located_prompt import LocatedPrompt
from ferryman_launcher.options import demo_model
from ferryman_router.bodies.place import BodyPlace
from ferryman_router.bodies.unread_fields import Api
from ferryman_router.intake.reader import BODY_KINDS
from ferryman_router.served_model import ServedModel
from ferryman_simulator.mooncake import BlockNames, mooncake_line

AGENTS = Path(__file__).parents[2] / "tests" / "router" / "agents"
APIS = {
    "/v1/messages": Api.MESSAGES,
    "/v1/chat/completions": Api.CHAT,
    "/v1/responses": Api.RESPONSES,
}
# Words of a client's instructions; its tools come with 12 words for each description.
LENGTHS = {
    "claude-code-2.1.332": 9000,
    "claude-code-2.1.197": 7000,
    "codex-0.171.0": 5000,
    "opencode-1.18.33": 4000,
    "qwen-code-0.24.4": 6000,
    "continue-1.5.47": 1200,
    "pi-0.73.1-chat": 900,
    "mini-swe-agent-2.4.6": 1500,
}
MAX_TOKENS = 60_000
ANSWER_TOKENS = 90
_SURROUNDINGS = ("environment", "system-reminder", "cwd")
_WORDS = "the red kite is in Oslo a fox sleeps night blue Lima where what seventeen wagons".split()


@dataclass(frozen=True, slots=True)
class SessionPrompt:
    """A prompt of a session, when it came, and its answer."""

    at_seconds: float
    prompt: LocatedPrompt
    answer: np.ndarray[Any, Any]


def bodies(client: str) -> list[tuple[Api, dict[str, Any]]]:
    """The bodies of a client's session, in order, each of a conversation with tools."""
    read = [json.loads(file.read_text()) for file in sorted((AGENTS / client).glob("*.json"))]
    posts = [(sent["path"].partition("?")[0], sent["body"]) for sent in read if sent.get("body")]
    return [(APIS[path], body) for path, body in posts if path in APIS]


def words(seed: str, count: int) -> str:
    """Always the same words for the same seed."""
    rng = Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(count))


class Session:
    """One person's use of one agent, in one folder."""

    def __init__(self, client: str, number: int, folder: int) -> None:
        self._client, self._number, self._folder = client, number, folder
        self._instructions: tuple[str, ...] = ()

    def body(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """A recorded body with words: those of the client's own are the same in all sessions."""
        others = ("instructions", "input[0]") if "input" in sent else ("messages[0].content",)
        self._instructions = ("system[2]",) if "system" in sent else others
        return {name: self._filled(value, name) for name, value in deepcopy(dict(sent)).items()}

    def _filled(self, value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {name: self._filled(inner, f"{path}.{name}") for name, inner in value.items()}
        if isinstance(value, list):
            return [self._filled(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
        return self._text(value, path) if isinstance(value, str) else value

    def _text(self, text: str, path: str) -> str:
        if path.endswith("description"):
            return words(f"{self._client}{path}", 12)
        if path.startswith("tools"):
            return text
        if "laceholder" in text:
            is_folder = any(word in text for word in _SURROUNDINGS)
            count = LENGTHS[self._client] if path.startswith(self._instructions) else 120
            own = f"folder {self._folder}" if is_folder else ""
            return text.lower().replace("placeholder", f"{own} {words(self._client + path, count)}")
        if path.endswith(("text", "content")) and text.endswith((".", "?")):
            return f"{text} {words(f'{self._client}{self._number}{text}', 30)}"
        return text


def session_of(
    model: ServedModel, client: str, number: int, begin: float, rng: Random
) -> Iterator[SessionPrompt]:
    """The prompts of one session; in every third one the last is asked again in other words."""
    session, at, prompts = Session(client, number, rng.randrange(4)), begin, list[LocatedPrompt]()
    for api, sent in bodies(client):
        prompts.append(_prompt(model, api, session.body(sent)))
    api, sent = bodies(client)[-1]
    if number % 3 == 0:
        prompts.append(_prompt(model, api, Session(client, number + 1000, 0).body(sent)))
    for prompt, following in zip(prompts, [*prompts[1:], prompts[-1]], strict=True):
        ids, shared = following.token_ids, common_length(prompt.token_ids, following.token_ids)
        answer = ids[shared : shared + ANSWER_TOKENS]
        if not len(answer):
            answer = np.array([rng.randrange(1000) for _ in range(ANSWER_TOKENS)], dtype="<u4")
        yield SessionPrompt(at, prompt, answer)
        at += 4.0 + rng.expovariate(1 / 20.0)


def _prompt(model: ServedModel, api: Api, body: dict[str, Any]) -> LocatedPrompt:
    (prompt,) = BODY_KINDS[api](body, BodyPlace.of_body()).prompts
    return model.tokenized(prompt, MAX_TOKENS)


def trace(num_sessions: int, gap_seconds: float, seed: int = 0) -> list[SessionPrompt]:
    """So many sessions of each client, one beginning every `gap_seconds`, in order of arrival."""
    model, rng = ServedModel.load(demo_model(), "", 0), Random(seed)
    prompts, begin = list[SessionPrompt](), 0.0
    for number in range(num_sessions):
        for client in LENGTHS:
            prompts += session_of(model, client, number, begin, rng)
            begin += rng.expovariate(1 / gap_seconds)
    return sorted(prompts, key=lambda traced: traced.at_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sessions", type=int, default=6, help="of each client")
    parser.add_argument("--gap", type=float, default=6.0, help="seconds between their beginnings")
    parser.add_argument("--block-tokens", type=int, default=16)
    asked = parser.parse_args()
    names, num_tokens = BlockNames(asked.block_tokens), 0
    prompts = trace(asked.sessions, asked.gap)
    with asked.file.open("w") as opened:
        for traced in prompts:
            ids, forks = traced.prompt.token_ids, traced.prompt.fork_points
            num_tokens += len(ids)
            line = mooncake_line(names, traced.at_seconds, ids, traced.answer, forks)
            opened.write(f"{line}\n")
    lengths = sorted(len(traced.prompt.token_ids) for traced in prompts)
    print(f"{len(prompts)} requests, {num_tokens} tokens, prompts of {lengths[0]} to {lengths[-1]}")


if __name__ == "__main__":
    main()
