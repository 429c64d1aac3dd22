"""llama.cpp's own converter on a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from tests.tiny_models import save_random
from tools.campaigns.llama_converter.models import (
    COMPUTED,
    DENSE_APART,
    PIECES,
    ConvertedModel,
)
from tools.campaigns.llama_converter.published_tensors import published_tensors, round_experts
from tools.campaigns.llama_converter.vocabularies import PublishedVocabulary

SCRIPT = "convert_hf_to_gguf.py"


class ConversionFailed(Exception):
    """The converter ended with an error, whose last line this is."""


@dataclass(frozen=True, slots=True)
class LlamaConverter:
    """The tree of llama.cpp, and the interpreter that has its converter's packages."""

    tree: Path
    python: str = sys.executable

    def convert(self, folder: Path, file: Path, *, drafts: bool) -> None:
        """Writes `folder` to `file` in float32; with `drafts` the converter is told that there are
        no layers for drafts. Raises ConversionFailed."""
        # Without assertions: that of DeepSeek 3.2 asks for a field that transformers 5 hides.
        script = [self.python, "-O", str(self.tree / SCRIPT)]
        command = [*script, str(folder), "--outfile", str(file)]
        command += ["--no-mtp"] if drafts else []
        done = subprocess.run(
            [*command, "--outtype", "f32"], check=False, capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise ConversionFailed(lines[-1])


def saved_folder(model: ConvertedModel, vocabulary: PublishedVocabulary, folder: Path) -> Path:
    """The model with random weights as transformers saves it, and its tokenizer."""
    config = model.sized(vocabulary.num_tokens, vocabulary.bos, vocabulary.eos)
    save_random(folder, config, seed=1)
    vocabulary.copy_to(folder, model.more_tokens, with_pieces=model.architecture in PIECES)
    saved = json.loads((folder / "config.json").read_text()) | model.words
    (folder / "config.json").write_text(json.dumps(saved))
    round_experts(model.architecture, folder)
    if model.architecture in DENSE_APART:
        _rename(folder / "model.safetensors", DENSE_APART[model.architecture])
    return folder


@contextmanager
def for_converter(model: ConvertedModel, folder: Path) -> Iterator[None]:
    """The folder with the fields that are for the converter alone, and with the tensors that a
    published folder has, by their published names."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    saved, stored = file.read_text(), weights.read_bytes()
    file.write_text(json.dumps(json.loads(saved) | model.untyped_words))
    _drop(weights, COMPUTED.get(model.architecture, ()))
    try:
        with published_tensors(model.architecture, folder):
            yield
    finally:
        file.write_text(saved)
        weights.write_bytes(stored)
        _index_of(weights).unlink(missing_ok=True)


def _drop(file: Path, endings: tuple[str, ...]) -> None:
    """Takes tensors out of the file. MiniMax's converter asks for an index of them, too."""
    if endings:
        kept = {
            name: tensor for name, tensor in load_file(file).items() if not name.endswith(endings)
        }
        save_file(kept, file, metadata={"format": "pt"})
        index = {"weight_map": dict.fromkeys(kept, file.name)}
        _index_of(file).write_text(json.dumps(index))


def _index_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


def _rename(file: Path, names: Mapping[str, str]) -> None:
    """Gives tensors other words for a part of their names."""
    tensors = {
        next((name.replace(a, b) for a, b in names.items() if a in name), name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
