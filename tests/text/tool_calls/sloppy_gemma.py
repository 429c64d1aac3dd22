"""Answers of Gemma 4 as it really wrote them (`sloppy.py`)."""

from __future__ import annotations

from tests.text.tool_calls.sloppy import A1, B2, Sloppy

_BEGIN, _END, _Q = "<|tool_call>", "<tool_call|>", '<|"|>'

GEMMA = {
    "two calls": Sloppy(
        "gemma4",
        "ml-explore/mlx-lm#1105",
        f"I look.{_BEGIN}call:f{{a:{_Q}1{_Q}}}{_END}{_BEGIN}call:f{{b:{_Q}2{_Q}}}{_END}",
        (A1, B2),
        "I look.",
    ),
    "quotes in a text": Sloppy(
        "gemma4",
        "xorbitsai/inference#5242",
        f'{_BEGIN}call:f{{a:{_Q}The user said "你好" (Hello), it is {{x}}, b:2{_Q},\n'
        f"b:{_Q}2{_Q}}}{_END}",
        (("f", '{"a": "The user said \\"你好\\" (Hello), it is {x}, b:2", "b": "2"}'),),
    ),
    "objects and lists within": Sloppy(
        "gemma4",
        "raullenchai/Rapid-MLX#1102",
        f"{_BEGIN}call:typed{{place:{{message:{_Q}How are you?{_Q}}},tags:[{_Q}a,b{_Q},{_Q}c{_Q}],"
        f"any:[{{x:1}},null]}}{_END}",
        (
            (
                "typed",
                '{"place": {"message": "How are you?"}, "tags": ["a,b", "c"], '
                '"any": [{"x": 1}, null]}',
            ),
        ),
    ),
    "values by their schemas": Sloppy(
        "gemma4",
        "vllm-project/vllm#47906",
        f"{_BEGIN}call:typed{{count:5,is_deep:true,ratio:1.5,new:3,plain:7,mode:1}}{_END}",
        (
            (
                "typed",
                '{"count": 5, "is_deep": true, "ratio": 1.5, "new": 3, "plain": "7", "mode": "1"}',
            ),
        ),
    ),
    "round brackets": Sloppy(
        "gemma4",
        "vllm-project/vllm#53642",
        f"{_BEGIN}call:shell(cmd:{_Q}ls -a{_Q}){_END}{_BEGIN}call:f{{a:{_Q}1{_Q}}}{_END}",
        (("shell", '{"cmd": "ls -a"}'), A1),
    ),
    "as Python writes it": Sloppy(
        "gemma4",
        "NousResearch/hermes-agent#7449",
        f"{_BEGIN}call:f(a=\"x, y\", b='z', c=None){_END}",
        (("f", '{"a": "x, y", "b": "z", "c": null}'),),
    ),
    "JSON's quotes in containers, another sign behind keys": Sloppy(
        "gemma4",
        "vllm-project/vllm#51307",
        f'{_BEGIN}call:typed{{plain:{_Q}"""\nx\n"""{_Q},tags=["ds_1",\'ds_2\'],place:{{"x": 1}},'
        f'name="a \\"b\\", c"}}{_END}',
        (
            (
                "typed",
                '{"plain": "\\"\\"\\"\\nx\\n\\"\\"\\"", "tags": ["ds_1", "ds_2"], '
                '"place": {"x": 1}, "name": "a \\"b\\", c"}',
            ),
        ),
    ),
    "a text without its first mark": Sloppy(
        "gemma4",
        "sgl-project/sglang#39240",
        f"{_BEGIN}call:f{{a:weather in Paris, France{_Q},b:{_Q}2{_Q}}}{_END}",
        (("f", '{"a": "weather in Paris, France", "b": "2"}'),),
    ),
    "texts without marks": Sloppy(
        "gemma4",
        "ollama/ollama#15374",
        f"{_BEGIN}call:f{{a:Paris, France, b:x}}{_END}",
        (("f", '{"a": "Paris, France", "b": "x"}'),),
    ),
    "single quotes, and a mark that was not begun": Sloppy(
        "gemma4",
        "ollama/ollama#15374",
        f"{_BEGIN}call:f{{a:'x, y'{_Q},b:{_Q}2{_Q}}}{_END}",
        (("f", '{"a": "x, y", "b": "2"}'),),
    ),
    "no closing brace": Sloppy(
        "gemma4",
        "ollama/ollama#15374",
        f"{_BEGIN}call:typed{{place:{{x:1{_END} So.",
        (("typed", '{"place": {"x": 1}}'),),
        "So.",
    ),
    "namespaces before the name": Sloppy(
        "gemma4",
        "jundot/omlx#1854",
        f"{_BEGIN}call:google:mcp:text:get-weather{{city:'Oslo, {{N}}'}}{_END}",
        (("get-weather", '{"city": "Oslo, {N}"}'),),
    ),
    "quoted keys": Sloppy(
        "gemma4",
        "",
        f'{_BEGIN}call:f{{{_Q}a{_Q}:{_Q}1{_Q},"b":{_Q}2{_Q}}}{_END}',
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    "no arguments": Sloppy(
        "gemma4",
        "",
        f"{_BEGIN}call:now{{}}{_END}{_BEGIN}call:now{_END}{_BEGIN}call:now",
        (("now", "{}"),) * 3,
    ),
    "an object that is a call": Sloppy(
        "gemma4", "", f'{_BEGIN}{{"name": "f", "arguments": {{"a": "1"}}}}{_END}', (A1,)
    ),
    "a mark that is spoken of": Sloppy(
        "gemma4", "", f"{_BEGIN} is {{ a mark }}.", (), f"{_BEGIN} is {{ a mark }}."
    ),
}

SLOPPY_GEMMA = {f"gemma, {name}": case for name, case in GEMMA.items()}
