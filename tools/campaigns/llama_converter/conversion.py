"""llama.cpp's own converter on a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_models import save_random
from tools.campaigns.llama_converter.models import PIECES, ConvertedModel
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
        command = [self.python, str(self.tree / SCRIPT), str(folder), "--outfile", str(file)]
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
    return folder
