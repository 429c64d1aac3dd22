"""Vocabularies of byte strings with ranks: tiktoken's files, and Mistral's tekken.json.

    tiktoken      one token a line: its bytes in base64, and its rank, which is its id
    tekken.json   {"config", "vocab": [{"rank", "token_bytes"}], "special_tokens"}; special tokens
                  have the first ids, and ranks count from there

Both merge, of all neighbours whose joined bytes are a token, those of the lowest rank first. BPE
with a list of merges does the same if every division of a token into two tokens is a merge.
(Formats: openai/tiktoken, load.py; mistralai/mistral-common, tekken.py.)
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ferryman.text.pieces import CHARACTER_OF_BYTE

MAX_TOKEN_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """`ids` by bytes, in the order of their ranks; `pattern` divides a text before tokens are
    merged."""

    ids: Mapping[bytes, int]
    pattern: str
    special: Mapping[str, int]

    def description(self) -> dict[str, Any]:
        """The form of `tokenizer.json`. Raises ValueError if a special token has an ordinary one's
        name or id, or a byte has no token."""
        vocab = {_spelt(token): token_id for token, token_id in self.ids.items()}
        missing = [byte for byte in range(256) if bytes([byte]) not in self.ids]
        if missing:
            raise ValueError(f"byte {missing[0]} has no token")
        if taken := set(vocab) & set(self.special):
            raise ValueError(f"special token {min(taken)!r} is an ordinary token, too")
        if len({*vocab.values(), *self.special.values()}) < len(vocab) + len(self.special):
            raise ValueError("two tokens have one id")
        return {
            "version": "1.0",
            "added_tokens": [
                added_token(name, at, special=True) for name, at in _by_id(self.special)
            ],
            "normalizer": None,
            "pre_tokenizer": _division(self.pattern),
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, **_BYTE_LEVEL},
            "model": {
                "type": "BPE",
                "ignore_merges": True,
                "vocab": {**vocab, **self.special},
                "merges": [[_spelt(left), _spelt(right)] for left, right in self._merges()],
            },
        }

    def _merges(self) -> Iterator[tuple[bytes, bytes]]:
        """Every division of a token into two tokens, by the rank of the whole."""
        for token in self.ids:
            divisions = (
                (token[:at], token[at:])
                for at in range(1, len(token))
                if token[:at] in self.ids and token[at:] in self.ids
            )
            yield from sorted(divisions, key=lambda pair: [self.ids[part] for part in pair])


_BYTE_LEVEL = {"trim_offsets": True, "use_regex": False}


def _division(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer: pieces by `pattern`, then bytes as characters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, **_BYTE_LEVEL}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def added_token(
    name: str, token_id: int, *, special: bool, normalized: bool = False
) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    return {
        "id": token_id,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def read_tiktoken(text: bytes) -> dict[bytes, int]:
    """Ranks by bytes, in their order. Raises ValueError for lines that are not of the format."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case []:
                continue
            case [token, rank] if rank.isdigit():
                ranks[_decoded(token)] = int(rank)
            case _:
                raise ValueError(f"line {number} is no token and rank")
    if len(set(ranks.values())) < len(ranks):
        raise ValueError("two tokens have one rank")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def read_tekken(raw: Mapping[str, Any]) -> ByteVocabulary:
    """Raises KeyError, TypeError or ValueError for what is not tekken.json."""
    config = raw["config"]
    num_special = int(config["default_num_special_tokens"])
    num_ordinary = int(config["default_vocab_size"]) - num_special
    # The file holds more than the model's vocabulary; those of higher rank are not used.
    kept = sorted(raw["vocab"], key=lambda entry: int(entry["rank"]))[:num_ordinary]
    ids = {_decoded(entry["token_bytes"]): int(entry["rank"]) + num_special for entry in kept}
    special = {f"<SPECIAL_{rank}>": rank for rank in range(num_special)}
    listed = raw.get("special_tokens") or [
        {"rank": rank, "token_str": name} for rank, name in enumerate(_FIRST_TEKKEN)
    ]
    for entry in listed:
        rank = int(entry["rank"])
        if not 0 <= rank < num_special:
            raise ValueError(f"special token {entry['token_str']!r} has rank {rank}")
        del special[f"<SPECIAL_{rank}>"]
        special[str(entry["token_str"])] = rank
    return ByteVocabulary(ids, str(config["pattern"]), special)


# The special tokens of files that do not list them (tekken v3).
_FIRST_TEKKEN = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)


def _decoded(token: str | bytes) -> bytes:
    token_bytes = base64.b64decode(token, validate=True)
    if not 0 < len(token_bytes) <= MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {len(token_bytes)} bytes")
    return token_bytes


def _spelt(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _by_id(special: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(special.items(), key=lambda item: item[1])
