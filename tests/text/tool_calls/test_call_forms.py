"""The grammar of each format's calls: it takes what its models write, and its parser reads whatever
the grammar lets a model write."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.walks import may_write, walk
from tests.text.folders import write_folder
from tests.text.tool_calls.samples import read

from ferryman.grammar.compiler import GrammarCompiler
from ferryman.schedule.output_grammar import OutputGrammar
from ferryman.text.tokenizer import Tokenizer
from ferryman.text.tool_calls.call_forms import CallWords, literal
from ferryman.text.tool_calls.format_table import TOOL_FORMATS
from ferryman.text.tool_calls.formats import FormAlone, FormOrCall

NAMES = ("get_weather", "mcp__files__read", "ns.stop")
USE = FormOrCall({name: {} for name in NAMES})
PARIS, NOTHING = '{"city": "Paris", "days": [1, 2]}', "{}"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"

# By format: texts as models write them, and the calls in them.
WRITTEN: dict[str, list[tuple[str, list[tuple[str, str]]]]] = {
    "hermes": [
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
            [("get_weather", PARIS)],
        ),
        (
            f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>\n'
            '<tool_call>\n{"name": "ns.stop", "arguments": {}}\n</tool_call>',
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
    ],
    "granite": [
        (
            f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}},'
            ' {"name": "ns.stop", "arguments": {}}]',
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
        ('<tool_call>[{"name": "ns.stop", "arguments": {}}]', [("ns.stop", NOTHING)]),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
            [("get_weather", PARIS)],
        ),
        (
            f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]ns.stop[CALL_ID]abcdef123[ARGS]{{}}",
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
        ("[TOOL_CALLS]ns.stop{}", [("ns.stop", NOTHING)]),
    ],
    "llama3_json": [
        (f'{{"name": "get_weather", "parameters": {PARIS}}}', [("get_weather", PARIS)]),
        (
            f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
            '{"name": "ns.stop", "parameters": {}}',
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
    ],
    "deepseek_v3": [
        (
            DEEPSEEK.format(
                DEEPSEEK_CALL.format(f"function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```")
                + "\n"
                + DEEPSEEK_CALL.format("function<｜tool▁sep｜>ns.stop\n```json\n{}\n```")
            ),
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
        (
            DEEPSEEK.format(DEEPSEEK_CALL.format(f"get_weather<｜tool▁sep｜>{PARIS}")),
            [("get_weather", PARIS)],
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <b>\n</b>\n</parameter>\n"
            "</function>\n</tool_call>",
            [("get_weather", '{"city": "Paris <b>\\n</b>"}')],
        ),
        ("<tool_call>\n<function=ns.stop>\n</function>\n</tool_call>", [("ns.stop", NOTHING)]),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Paris <b>\n</b>'
            '</parameter>\n</invoke>\n<invoke name="ns.stop">\n</invoke>\n</minimax:tool_call>',
            [("get_weather", '{"city": "Paris <b>\\n</b>"}'), ("ns.stop", NOTHING)],
        ),
    ],
    "deepseek_v32": [
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris </b></｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [("get_weather", '{"city": "Paris </b>", "days": [1, 2]}')],
        ),
        (
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ns.stop">\n</｜DSML｜invoke>\n'
            "</｜DSML｜tool_calls>",
            [("ns.stop", NOTHING)],
        ),
    ],
    "lfm2": [
        (
            '<|tool_call_start|>[get_weather(city="Paris", days=[1, 2]), ns.stop()]'
            "<|tool_call_end|>",
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
    ],
    "olmo3": [
        (
            '<function_calls>\nget_weather(city="Paris", days=[1, 2])\nns.stop()\n'
            "</function_calls>",
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
        ("<function_calls>ns.stop()</function_calls>", [("ns.stop", NOTHING)]),
    ],
    "gemma4": [
        (
            '<|tool_call>call:get_weather{city:<|"|>Paris <b>\n"<|"|>,days:[1,2],at:{x:null}}'
            "<tool_call|><|tool_call>call:ns.stop{}<tool_call|>",
            [
                ("get_weather", '{"city": "Paris <b>\\n\\"", "days": [1, 2], "at": {"x": null}}'),
                ("ns.stop", NOTHING),
            ],
        ),
    ],
    "seed_oss": [
        (
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris <b>\n</b>"
            "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=ns.stop>\n</function>\n"
            "</seed:tool_call>",
            [("get_weather", '{"city": "Paris <b>\\n</b>"}'), ("ns.stop", NOTHING)],
        ),
    ],
    "glm45": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris <b>\n</b>"
            "</arg_value>\n</tool_call>\n<tool_call>ns.stop\n</tool_call>",
            [("get_weather", '{"city": "Paris <b>\\n</b>"}'), ("ns.stop", NOTHING)],
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days"
            "</arg_key><arg_value>2</arg_value></tool_call>",
            [("get_weather", '{"city": "Oslo", "days": "2"}')],
        ),
    ],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>"
            "functions.ns.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
    ],
    "openai": [
        (
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + PARIS,
            [("get_weather", PARIS)],
        ),
        (
            " to=functions.mcp__files__read<|channel|>commentary json<|message|>{}",
            [("mcp__files__read", NOTHING)],
        ),
    ],
    "pythonic": [
        (
            '[get_weather(city="Paris", days=[1, 2]), ns.stop()]',
            [("get_weather", PARIS), ("ns.stop", NOTHING)],
        ),
        (
            "```tool_code\n[get_weather(a='x', b={'c': None, \"d\": True}, e=-1.5)]\n```",
            [("get_weather", '{"a": "x", "b": {"c": null, "d": true}, "e": -1.5}')],
        ),
    ],
}


class Vocabulary:
    """A tokenizer in which the marks of a format are control tokens, or none."""

    def __init__(self, folder: Path, marks: frozenset[str]) -> None:
        write_folder(folder)
        path = folder / "tokenizer.json"
        description = json.loads(path.read_text())
        first = 1 + max(
            *description["model"]["vocab"].values(), *(t["id"] for t in description["added_tokens"])
        )
        for token_id, mark in enumerate(sorted(marks), first):
            token = {"id": token_id, "content": mark, "special": True, "single_word": False}
            token |= {"lstrip": False, "rstrip": False, "normalized": False}
            description["added_tokens"].append(token)
        path.write_text(json.dumps(description))
        self.tokenizer = Tokenizer.load(folder)
        vocab_size = self.tokenizer.vocab_size
        self.compiler = GrammarCompiler.for_tokenizer(self.tokenizer, vocab_size)

    def mark(self, text: str) -> str:
        if text not in self.tokenizer.control_tokens:
            return literal(text)
        return f"<[{self.tokenizer.encoder.token_to_id(text)}]>"

    def matcher(self, name: str, *others: OutputGrammar) -> Any:
        words = CallWords(NAMES, self.mark)
        grammar = OutputGrammar.context_free(TOOL_FORMATS[name].form(words))
        grammar = OutputGrammar.either((grammar, *others)) if others else grammar
        return self.compiler.compiled(grammar).matcher()


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def vocabularies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Vocabulary]:
    has_tokens = request.param == "marks are tokens"
    return {
        name: Vocabulary(tmp_path_factory.mktemp(name), form.special if has_tokens else frozenset())
        for name, form in TOOL_FORMATS.items()
    }


def test_every_format_is_tried() -> None:
    assert WRITTEN.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_the_grammar_takes_what_models_write(
    vocabularies: dict[str, Vocabulary], name: str
) -> None:
    vocabulary = vocabularies[name]
    for text, calls in WRITTEN[name]:
        assert may_write(vocabulary.matcher(name), vocabulary.tokenizer, text), text
        answer = read(name, [text], use=USE)
        assert (answer.content, list(answer.calls)) == ("", calls)
        other = text.replace("get_weather", "get_wether").replace("ns.stop", "halt")
        other = other.replace("mcp__files__read", "x")
        assert not may_write(vocabulary.matcher(name), vocabulary.tokenizer, other)
        assert read(name, [other], use=USE).calls == ()


# A value between tags is any text up to a tag, which no random walk writes.
_TAGGED = {"deepseek_v32", "gemma4", "glm45", "minimax_m2", "qwen3_coder", "seed_oss"}


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - _TAGGED))
def test_whatever_the_grammar_writes_is_read_as_calls(
    vocabularies: dict[str, Vocabulary], name: str
) -> None:
    vocabulary = vocabularies[name]
    tokenizer = vocabulary.tokenizer
    for seed in range(12):
        token_ids = walk(vocabulary.matcher(name), tokenizer, random.Random(seed))
        raw = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
        text = raw.decode("utf-8", "replace")
        answer = read(name, [text], use=USE)
        assert answer.content == "", text
        assert answer.calls, text
        for called, arguments in answer.calls:
            assert called in NAMES
            assert isinstance(json.loads(arguments), dict)


SHAPE = OutputGrammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
# A call in Llama's format, but for its name.
SHAPED = '{"name": "get_weather!", "age": 7}'


@pytest.mark.parametrize("name", WRITTEN)
def test_a_form_beside_calls_is_written_and_read_as_content(
    vocabularies: dict[str, Vocabulary], name: str
) -> None:
    vocabulary = vocabularies[name]
    for text in (SHAPED, WRITTEN[name][0][0]):
        assert may_write(vocabulary.matcher(name, SHAPE), vocabulary.tokenizer, text), text
    assert not may_write(vocabulary.matcher(name, SHAPE), vocabulary.tokenizer, '{"name": "x"}')
    rows = OutputGrammar.json_schema({"type": "array", "items": {"type": "integer"}})
    for text in ("[1, 2]", WRITTEN[name][0][0]):
        assert may_write(vocabulary.matcher(name, rows), vocabulary.tokenizer, text), text
    for pieces in ([SHAPED], SHAPED):
        answer = read(name, pieces, use=USE)
        assert (answer.content, answer.calls) == (SHAPED, ())


# These begin calls without marks, as a form may begin.
_BARE = {"llama3_json", "pythonic"}


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - _BARE))
def test_no_cut_of_a_call_beside_a_form_shows_its_marks(name: str) -> None:
    for text, _ in WRITTEN[name]:
        for end in range(3, len(text)):
            assert read(name, text[:end], use=USE, is_cut=True).content == "", text[:end]


# Headers of harmony are no text, wherever they stand.
@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"openai"}))
def test_a_form_is_shown_whatever_calls_are_in_it(name: str) -> None:
    form = json.dumps({"a": WRITTEN[name][0][0], "name": "get_weather"}, ensure_ascii=False)
    for end in range(len(form) + 1):
        for is_cut in (True, False):
            answer = read(name, form[:end], use=USE, is_cut=is_cut)
            assert (answer.content, answer.calls) == (form[:end], ())


@pytest.mark.parametrize("use", [FormAlone(), USE], ids=["alone", "or a call"])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1", "mistral", "granite"])
def test_a_form_is_content_though_the_prompt_has_begun_a_thought(parser: str, use: Any) -> None:
    for tail in ("<think>\n", "[THINK]", ""):
        answer = read("hermes", '{"a": 1}', use=use, reasoning=parser, prompt_tail=tail)
        assert (answer.content, answer.reasoning) == ('{"a": 1}', "")
