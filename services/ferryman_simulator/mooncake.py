"""Mooncake's JSONL: one request a line, its prompt as names of blocks.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds; an id names a block of 512 tokens and everything before it; the last
may be partial. Two fields are our own, and may be absent: `answer_ids` names the blocks of prompt
and answer together after the prompt's last full block, so that a next turn can repeat the answer;
`fork_points` are positions at which other prompts are likely to part from this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ferryman_simulator.trace import (
    MAX_REQUESTS,
    MAX_TOKENS,
    OWN_NAMES,
    BadTrace,
    Trace,
    TracedRequest,
    blocks,
    by_arrival,
    own,
)

BLOCK_TOKENS = 512


def read_mooncake(path: Path, lines: Iterable[tuple[int, str]], block_tokens: int) -> Trace:
    """The trace in numbered `lines` of `path`. Raises BadTrace."""
    requests: list[TracedRequest] = []
    for number, line in lines:
        record = _object(path, number, line)
        seconds = _number(path, number, record, "timestamp") / 1000
        if len(requests) == MAX_REQUESTS:
            raise BadTrace(path, number, f"a trace has at most {MAX_REQUESTS} requests")
        requests.append(_request(path, number, record, seconds, block_tokens))
    return Trace(by_arrival(requests))


def _request(
    path: Path, number: int, record: Mapping[str, object], arrival: float, block_tokens: int
) -> TracedRequest:
    prompt_len = _length(path, number, record, "input_length")
    output_len = _length(path, number, record, "output_length")
    names = _names(path, number, record, "hash_ids")
    if len(names) != -(-prompt_len // block_tokens):
        raise BadTrace(
            path,
            number,
            f"{len(names)} hash_ids do not cover {prompt_len} tokens in blocks of {block_tokens}; "
            "is --block-tokens right?",
        )
    content = blocks(names, block_tokens, prompt_len).then(own(number, output_len))
    if "answer_ids" in record:
        more = _names(path, number, record, "answer_ids")
        whole = [*names[: prompt_len // block_tokens], *more]
        content = blocks(whole, block_tokens, prompt_len + output_len)
        if content.num_tokens < prompt_len + output_len:
            raise BadTrace(path, number, "answer_ids do not cover the answer")
    forks = record.get("fork_points", [])
    if not isinstance(forks, list) or not all(type(at) is int and 0 <= at for at in forks):
        raise BadTrace(path, number, "fork_points should be a list of whole numbers from 0 on")
    return TracedRequest(f"line-{number}", arrival, content, prompt_len, tuple(sorted(forks)))


def _object(path: Path, number: int, line: str) -> Mapping[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadTrace(path, number, f"no JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadTrace(path, number, "a line should be a JSON object")
    return record


def _number(path: Path, number: int, record: Mapping[str, object], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise BadTrace(path, number, f"{name} should be a number from 0 on")
    return float(value)


def _length(path: Path, number: int, record: Mapping[str, object], name: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise BadTrace(path, number, f"{name} should be a whole number from 1 to {MAX_TOKENS}")
    return value


def _names(path: Path, number: int, record: Mapping[str, object], name: str) -> list[int]:
    value = record.get(name)
    if not isinstance(value, list) or not all(
        isinstance(block, int) and not isinstance(block, bool) and 0 <= block < OWN_NAMES
        for block in value
    ):
        raise BadTrace(path, number, f"{name} should be a list of whole numbers from 0 on")
    return value


class BlockNames:
    """Names for blocks of real tokens, in Mooncake's way: one for each block together with its
    prefix, counted from 0."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._names: dict[tuple[int, bytes], int] = {}

    def of(self, token_ids: ArrayLike) -> list[int]:
        """A name for every block of a sequence, the partial last one too."""
        tokens, parent, names = np.asarray(token_ids, dtype="<u4"), -1, []
        for start in range(0, len(tokens), self.block_tokens):
            block = (parent, tokens[start : start + self.block_tokens].tobytes())
            parent = self._names.setdefault(block, len(self._names))
            names.append(parent)
        return names


def mooncake_line(
    names: BlockNames,
    arrival_seconds: float,
    prompt: ArrayLike,
    answer: ArrayLike,
    fork_points: Sequence[int] = (),
) -> str:
    """One request with its answer, as a line of a trace."""
    prompt, answer = np.asarray(prompt, dtype="<u4"), np.asarray(answer, dtype="<u4")
    whole = names.of(np.concatenate([prompt, answer]))
    record: dict[str, object] = {
        "timestamp": round(arrival_seconds * 1000),
        "input_length": len(prompt),
        "output_length": len(answer),
        "hash_ids": names.of(prompt),
        "answer_ids": whole[len(prompt) // names.block_tokens :],
    }
    if fork_points:
        record["fork_points"] = list(fork_points)
    return json.dumps(record, separators=(",", ":"))
