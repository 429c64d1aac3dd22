"""`ferryman chat`: a conversation in the terminal, streamed, with the amount of reuse."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from ferryman.client import (
    NOT_PARTED,
    ChatTurn,
    Client,
    GenerateFinished,
    GenerateStarted,
    Parting,
    SamplingParams,
    TokenChunk,
    Usage,
)
from ferryman.errors import FerrymanError
from ferryman_cli.endpoints import DoorPlace

HELP = "/reset forgets the conversation, /quit ends; Ctrl-C ends an answer"
LEAST_MISSED = 64  # tokens: less is no news
QUIT, RESET = ("/quit", "/exit"), "/reset"

ReadLine = Callable[[], str]


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the answer in progress."""

    turns: list[ChatTurn] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append(ChatTurn("user", text))
        self.pieces.clear()

    def answered(self) -> None:
        """Adds the answer as a turn; a question without an answer is removed."""
        if self.pieces:
            self.turns.append(ChatTurn("assistant", "".join(self.pieces)))
        else:
            self.turns.pop()


class Chat:
    """Asks for lines and streams answers. Each answer runs on `runner`, so that Ctrl-C ends it."""

    def __init__(self, client: Client, console: Console, sampling: SamplingParams) -> None:
        self._client, self._console, self._sampling = client, console, sampling
        self._conversation = Conversation()

    def run(self, runner: asyncio.Runner, read_line: ReadLine) -> None:
        """Runs until the end of the input, or /quit."""
        for line in _lines(read_line):
            if line in QUIT:
                return
            if line == RESET:
                self._conversation = Conversation()
                self._console.print("forgotten", style="dim")
            elif line.startswith("/"):
                self._console.print(HELP, style="dim")
            elif line:
                self._turn(runner, line)

    def _turn(self, runner: asyncio.Runner, line: str) -> None:
        self._conversation.ask(line)
        try:
            runner.run(self._answer())
        except KeyboardInterrupt:
            self._console.print("\n(stopped)", style="dim")
        except FerrymanError as error:
            self._console.print(Text(f"\n{error.reason}: {error}", "red"))
        finally:
            self._conversation.answered()

    async def _answer(self) -> None:
        turns, request_id, parting = list(self._conversation.turns), "", NOT_PARTED
        async with aclosing(self._client.generate(turns, self._sampling)) as events:
            async for event in events:
                match event:
                    case GenerateStarted():
                        request_id, parting = event.request_id, event.parting
                    case TokenChunk():
                        self._write(event.text)
                    case GenerateFinished():
                        self._write(event.text)
                        note = Text(f"\n{usage_note(event.usage, request_id)}", "dim")
                        self._console.print(note)
                        if parting.missed_tokens >= LEAST_MISSED:
                            self._console.print(Text(parting_note(parting), "dim"))

    def _write(self, text: str) -> None:
        if text:
            self._conversation.pieces.append(text)
            self._console.print(Text(text), end="", soft_wrap=True)


def usage_note(usage: Usage, request_id: str) -> str:
    """The amount of the conversation that was reused, and the id with which to trace the answer."""
    cached = usage.cached
    tiers = [f"{cached.device} on the device", f"{cached.host} from the host"]
    tiers += [f"{cached.storage} from storage"] if cached.storage else []
    tiers += [f"{cached.peer} from a peer"] if cached.peer else []
    return (
        f"[{usage.prompt_tokens} prompt tokens, {cached.total} of them cached"
        f" ({', '.join(tiers)}); {usage.completion_tokens} new; {request_id}]"
    )


def parting_note(parting: Parting) -> str:
    """The place at which the prompt parts from an earlier one, with the characters there."""
    return (
        f"[parts at token {parting.position}, in {parting.place}, from request"
        f" {parting.request_id}: {parting.missed_tokens} tokens computed that may have been cached;"
        f" after {parting.before!r} {parting.ours!r} instead of {parting.theirs!r}]"
    )


def run_chat(door: DoorPlace, sampling: SamplingParams) -> int:
    console = Console(highlight=False)
    with asyncio.Runner() as runner:
        client = runner.run(_opened(door))
        try:
            models = runner.run(client.models(deadline_seconds=5.0))
            served = ", ".join(card.model_id for card in models)
            console.print(f"chatting with {served} at {door.address}; {HELP}", style="dim")
            Chat(client, console, sampling).run(runner, terminal_lines(console))
        finally:
            runner.run(client.close())
    return 0


async def _opened(door: DoorPlace) -> Client:
    """Opens the client on the loop of its calls: channels belong to the loop that made them."""
    return Client(door.address, tls=door.tls())


def terminal_lines(console: Console) -> ReadLine:
    """Reads from a terminal with a prompt, from a pipe without one."""
    if sys.stdin.isatty():
        return lambda: console.input("[bold]you> [/bold]")
    return lambda: input()


def _lines(read_line: ReadLine) -> Iterable[str]:
    """Lines until the end of the input; Ctrl-C at the prompt only clears it."""
    while True:
        try:
            yield read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
