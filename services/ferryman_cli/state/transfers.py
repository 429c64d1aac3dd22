"""`ferryman state save`, `load` and `show`."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from ferryman.client import Client
from ferryman.errors import CorruptState
from ferryman.wire.codec.state_statement import StateStatement
from ferryman.wire.public import LoadedState
from ferryman_cli.endpoints import DoorPlace
from ferryman_cli.state.state_file import StateFile, opened_state_file, written_state_file


def run_save(door: DoorPlace, request_id: str, path: Path, *, api_key: str, as_json: bool) -> int:
    statement = asyncio.run(_save(door, request_id, path, api_key))
    if as_json:
        print(json.dumps(asdict(statement)))
    else:
        print(f"{path} has the state of {statement.num_tokens} tokens: {_units(statement)}")
    return 0


async def _save(door: DoorPlace, request_id: str, path: Path, api_key: str) -> StateStatement:
    async with Client(door.address, api_key=api_key, tls=door.tls()) as client:
        with written_state_file(path) as file:
            async with aclosing(client.save_state(request_id)) as parts:
                async for part in parts:
                    if not isinstance(part, bytes):
                        return file.finish(part)
                    file.add(part)
            raise CorruptState("the router ended the state without a signature")


def run_load(door: DoorPlace, path: Path, *, api_key: str, as_json: bool) -> int:
    with opened_state_file(path) as file:
        # Before a byte is sent: who has a damaged file should not have to wait for a cluster.
        file.check()
        loaded = asyncio.run(_load(door, file, api_key))
    if as_json:
        print(json.dumps(asdict(loaded)))
        return 0
    of_all = "" if loaded.usable_tokens == loaded.num_tokens else f" of {loaded.num_tokens}"
    print(f"{loaded.node} has the state of {loaded.usable_tokens}{of_all} tokens of {path}")
    if of_all:
        print("there was no room for the rest: give it more by FERRYMAN_HOST_MEMORY")
    elif not loaded.stored_units:
        print("it was there before")
    return 0


async def _load(door: DoorPlace, file: StateFile, api_key: str) -> LoadedState:
    async with Client(door.address, api_key=api_key, tls=door.tls()) as client:
        return await client.load_state(file.signed, file.pieces())


def run_show(path: Path, *, as_json: bool) -> int:
    """Prints what a file holds, and checks all of it."""
    with opened_state_file(path) as file:
        statement, num_bytes = file.statement, file.num_bytes
        if as_json:
            print(json.dumps({"bytes": num_bytes, **asdict(statement)}))
        else:
            for name, value in _lines(statement, num_bytes):
                print(f"{name:<12}{value}")
        file.check()
    return 0


def _lines(statement: StateStatement, num_bytes: int) -> list[tuple[str, str]]:
    adapter = [("adapter", statement.adapter)] if statement.adapter else []
    return [
        ("model", f"{statement.model} ({statement.family})"),
        *adapter,
        ("weights", statement.fingerprint),
        ("arithmetic", statement.arithmetic),
        ("tokens", f"{statement.num_tokens}, in pages of {statement.page_size}"),
        ("units", _units(statement)),
        ("bytes", str(num_bytes)),
        ("signed by", statement.signer),
    ]


def _units(statement: StateStatement) -> str:
    counts = ((kind, statement.count(kind)) for kind in statement.pages)
    return ", ".join(f"{number} {kind}" for kind, number in counts if number)
