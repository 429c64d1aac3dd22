"""Texts divide into tokens as llama.cpp divides them, for each name that a GGUF file may have.

`divisions.json` was recorded from llama.cpp by `python -m tools.campaigns.llama_converter`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_models.test_vocabularies import saved
from tools.campaigns.llama_converter.divisions import vocabulary_keys

from ferryman.text.tokenizer import Tokenizer
from ferryman.text.vocabulary.text_divisions import DIVISIONS

RECORD: Mapping[str, Any] = json.loads((Path(__file__).parent / "divisions.json").read_text())
ANSWERS: Mapping[str, list[list[int]]] = {
    pre: answer["token_ids"] for answer in RECORD["answers"] for pre in answer["pre"]
}
MARKS, CASE = "កាន់តែ हिन्दी ไทย", "iPhone CamelCase eBay"
DIGITS = "我想在apple工作1314天～ ------======= нещо"
CAPITALS = "нещо ÉCOLE ñandú ŻÓŁĆ ÉCOLE ÓŁĆ"
# Published patterns cut by the case of any letter, and take combining marks for letters. llama.cpp
# cuts by the case of A to Z alone, or, of four names, not at all, and has no marks in most of them.
# Cohere's pattern counts digits from their end unless a letter follows them, llama.cpp in any case.
UNLIKE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "tekken"), (MARKS, CAPITALS)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (DIGITS, CASE)),
    "kimi-k2": (MARKS, CASE),
    "youtu": (CASE,),
}


@pytest.mark.parametrize("pre", DIVISIONS)
def test_texts_divide_as_in_llama_cpp(pre: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "vocabulary.gguf", vocabulary_keys(pre, RECORD["merges"]))
    tokenizer = Tokenizer.load(file)
    unlike = UNLIKE.get(pre, ())
    for line, expected in zip(RECORD["page"], ANSWERS[pre], strict=True):
        token_ids = tokenizer.encode(line).tolist()
        assert (token_ids == expected) is (line not in unlike), line
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == line


def test_the_table_has_the_names_that_were_recorded() -> None:
    """Those of tokenizers whose models are read are among them."""
    assert set(DIVISIONS) == set(ANSWERS)


def test_the_page_tells_divisions_apart() -> None:
    """A page on which all names agree would prove nothing."""
    assert len(RECORD["answers"]) >= 15
    for other in ("smollm", "llama-bpe", "qwen2", "deepseek-v3", "deepseek-llm", "falcon"):
        assert ANSWERS["gpt-2"] != ANSWERS[other]
    assert ANSWERS["glm4"] != ANSWERS["chatglm-bpe"]
