"""Answers of LFM2 and Olmo 3 as they really wrote them (`sloppy.py`)."""

from __future__ import annotations

from tests.text.tool_calls.sloppy import A1, B2, Sloppy

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"

LFM = {
    "a space before the mark": Sloppy(
        "lfm2",
        "vllm-project/vllm#39243",
        f'{_BEGIN}[f(a="1")] {_END}',
        (A1,),
    ),
    "a space behind the mark, words around it": Sloppy(
        "lfm2",
        "vllm-project/vllm#48171",
        f"I look. {_BEGIN} [f(a='1')]{_END}Then I tell.",
        (A1,),
        "I look.Then I tell.",
    ),
    "brackets in a string": Sloppy(
        "lfm2",
        "vllm-project/vllm#48171",
        f"{_BEGIN}[shell(cmd='grep -F \"]\" log.txt')]{_END}",
        (("shell", '{"cmd": "grep -F \\"]\\" log.txt"}'),),
    ),
    "lines in a string": Sloppy(
        "lfm2",
        "vllm-project/vllm#48171",
        f"{_BEGIN}[shell(cmd='cat > f.py << EOF\nx\nEOF')]{_END}",
        (("shell", '{"cmd": "cat > f.py << EOF\\nx\\nEOF"}'),),
    ),
    "negative numbers, tuples, words of Python": Sloppy(
        "lfm2",
        "vllm-project/vllm#48171",
        f"{_BEGIN}[f(a=-74.5, b=(800, 600), from=1)]{_END}",
        (("f", '{"a": -74.5, "b": [800, 600], "from": 1}'),),
    ),
    "dots in names, words of JSON": Sloppy(
        "lfm2",
        "sgl-project/sglang#27614",
        f'{_BEGIN}[Calendar.create_event(title="demo", metadata={{"reminder": true}})]{_END}',
        (("Calendar.create_event", '{"title": "demo", "metadata": {"reminder": true}}'),),
    ),
    "quotes in code": Sloppy(
        "lfm2",
        "ggml-org/llama.cpp#26658",
        f"{_BEGIN}[f(a=\"plt.plot(x, y, 'red', label='')\\nplt.show()\")]{_END}",
        (("f", "{\"a\": \"plt.plot(x, y, 'red', label='')\\nplt.show()\"}"),),
    ),
    "no marks": Sloppy(
        "lfm2", "raullenchai/Rapid-MLX#1076", "[f(a='1'), now()]", (A1, ("now", "{}"))
    ),
    "JSON, as the history has it": Sloppy(
        "lfm2",
        "theroyallab/tabbyAPI#464",
        f'{_BEGIN}[{{"name": "f", "arguments": {{"a": "1"}}, "id": "c1"}}, '
        f'{{"name": "now", "arguments": {{}}}}]{_END}',
        (A1, ("now", "{}")),
    ),
    "one object": Sloppy(
        "lfm2", "", f'{_BEGIN}{{"name": "f", "arguments": {{"a": "1"}}}}{_END}', (A1,)
    ),
    "calls on lines": Sloppy("lfm2", "", f"{_BEGIN}f(a='1')\nf(b='2'){_END}", (A1, B2)),
    "two lists": Sloppy(
        "lfm2", "", f"{_BEGIN}[f(a='1')]{_END}\n{_BEGIN}[f(b='2')]{_END}", (A1, B2)
    ),
    "no last bracket, no mark": Sloppy("lfm2", "", f"{_BEGIN}[f(a='1')", (A1,)),
    "a list of text": Sloppy("lfm2", "", "[see(page=1)] tells", (), "[see(page=1)] tells"),
    "a mark that is spoken of": Sloppy("lfm2", "", f"Write {_BEGIN}.", (), f"Write {_BEGIN}."),
}

OLMO = {
    "two calls on lines": Sloppy(
        "olmo3",
        "vllm-project/vllm#26143",
        "<function_calls>f(a='1')\nf(b='2')</function_calls>",
        (A1, B2),
    ),
    "lines around them, words before": Sloppy(
        "olmo3",
        "vllm-project/vllm#55850",
        "I look.\n<function_calls>\nf(a='1')\nnow()\n</function_calls>",
        (A1, ("now", "{}")),
        "I look.",
    ),
    "words of JSON": Sloppy(
        "olmo3",
        "ml-explore/mlx-lm#1271",
        "<function_calls>f(a=null, b=[true, false])</function_calls>",
        (("f", '{"a": null, "b": [true, false]}'),),
    ),
    "lines in a string, the end within it": Sloppy(
        "olmo3",
        "",
        "<function_calls>\nf(a='x\n</function_calls>')\n</function_calls>",
        (("f", '{"a": "x\\n</function_calls>"}'),),
    ),
    "a list": Sloppy(
        "olmo3", "", "<function_calls>\n[f(a='1'), f(b='2')]\n</function_calls>", (A1, B2)
    ),
    "no end": Sloppy("olmo3", "", "<function_calls>\nf(a='1')\n", (A1,)),
    "commas between calls": Sloppy(
        "olmo3", "", "<function_calls>f(a='1'), f(b='2')</function_calls>So.", (A1, B2), "So."
    ),
    "nothing": Sloppy(
        "olmo3", "", "<function_calls></function_calls>", (), "<function_calls></function_calls>"
    ),
}

SLOPPY_PYTHON = {
    f"{cases}, {name}": case
    for cases, group in {"lfm": LFM, "olmo": OLMO}.items()
    for name, case in group.items()
}
