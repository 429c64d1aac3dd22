"""A model by transformers from its folder, by Ferryman and llama.cpp from the converter's file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tests.model.paged_run import PagedRun, Part
from tests.oracle import load_oracle
from tools.bench.contender_process import LLAMA_CPP, contender_process
from tools.campaigns.llama_converter.divisions import PAGE
from tools.campaigns.published_tokenizers import TEXTS
from torch import Tensor

from ferryman.errors import ConfigError, FerrymanError
from ferryman.gguf.documents import read_document
from ferryman.gguf.model_file import read_model
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.text.vocabulary.gguf_vocabulary import read_gguf_vocabulary
from ferryman_bench.engine_process import BenchModel

CONFIG = "tokenizer_config.json"
PROMPT = [(7 * place * place + 3) % 1310 + 300 for place in range(40)]
"""Longer than the windows of the tiny models."""


@dataclass(frozen=True, slots=True)
class ConvertedRow:
    """The findings about one file: differences of logits over the largest one, and everything else
    that is not as in the folder."""

    name: str
    architecture: str
    division: str
    to_transformers: float
    to_llama_cpp: float | str
    config: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        llama = self.to_llama_cpp
        return (
            self.name,
            self.architecture,
            self.division,
            f"{self.to_transformers:.0e}",
            llama if isinstance(llama, str) else f"{llama:.0e}",
            ", ".join(self.config) or "equal",
            ", ".join(self.texts) or "equal",
        )


def compare(name: str, folder: Path, file: Path, *, asks_llama: bool) -> ConvertedRow:
    """Raises ConfigError for a file that Ferryman does not read."""
    metadata = read_model(file).metadata
    ours = _logits(file)
    theirs = load_oracle(folder, torch.float64).logits(PROMPT)
    keys = (f"tokenizer.ggml.{key}" for key in ("model", "pre"))
    return ConvertedRow(
        name,
        metadata.architecture,
        "/".join(metadata.text(key, "-") for key in keys),
        _difference(ours, theirs),
        _llama_difference(file, ours[-1]) if asks_llama else "not asked",
        tuple(dict.fromkeys(config_differences(load_config(file), load_config(folder)))),
        tuple(text_differences(file, folder)),
    )


def config_differences(file: Any, folder: Any, path: str = "") -> Iterator[str]:
    """The names of the fields that differ, without those of layers' numbers."""
    if dataclasses.is_dataclass(file) and type(file) is type(folder):
        for field in dataclasses.fields(file):
            ours, beside = (getattr(value, field.name) for value in (file, folder))
            yield from config_differences(ours, beside, field.name)
    elif isinstance(file, tuple) and isinstance(folder, tuple) and len(file) == len(folder):
        for ours, beside in zip(file, folder, strict=True):
            yield from config_differences(ours, beside, path)
    elif file != folder:
        yield path or "family"


def text_differences(file: Path, folder: Path) -> Iterator[str]:
    """The first letters of texts whose tokens are not those of `tokenizer.json`, and "template"."""
    ours = tokenizers.Tokenizer.from_str(json.dumps(read_gguf_vocabulary(file)))
    published = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, *PAGE):
        pair = (held.encode(text, add_special_tokens=False).ids for held in (ours, published))
        if next(pair) != next(pair):
            yield json.dumps(text[:12], ensure_ascii=False)
    documents = (read_document(file / CONFIG), json.loads((folder / CONFIG).read_text()))
    templates = [document and document.get("chat_template") for document in documents]
    if isinstance(templates[0], list):
        templates[0] = templates[0][0]["template"]
    if (folder / "chat_template.jinja").exists():
        templates[1] = (folder / "chat_template.jinja").read_text()
    if templates[0] != templates[1]:
        yield "template"


def _logits(file: Path) -> Tensor:
    run = PagedRun(load_model(file, LoadOptions("float64", page_size=16)))
    return run.prefill([Part(run.start(), PROMPT)])[0]


def _llama_difference(file: Path, ours: Tensor) -> float | str:
    """llama.cpp ends its process for a file that it does not take."""
    try:
        with contender_process(LLAMA_CPP, BenchModel(file, "float32", threads=1)) as llama:
            answer = llama.ask(do="logits", token_ids=PROMPT)["logits"]
    except (ConfigError, FerrymanError, OSError, EOFError) as error:
        return str(error).splitlines()[-1][:60] or type(error).__name__
    return _difference(torch.tensor(answer, dtype=torch.float64), ours)


def _difference(these: Tensor, those: Tensor) -> float:
    return float((these - those).abs().max() / those.abs().max())
