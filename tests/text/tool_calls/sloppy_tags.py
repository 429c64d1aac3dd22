"""Answers whose arguments stand between tags, as models really wrote them (`sloppy.py`)."""

from __future__ import annotations

from tests.text.tool_calls.sloppy import A1, B2, Sloppy

_GLM_A1 = "<arg_key>a</arg_key><arg_value>1</arg_value>"
_GLM_B2 = "<arg_key>b</arg_key><arg_value>2</arg_value>"

GLM = {
    "lines between the tags": Sloppy(
        "glm45",
        "ml-explore/mlx-lm#1612",
        "Well.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        (A1, B2),
        "Well.",
    ),
    "no arguments": Sloppy(
        "glm45",
        "vllm-project/vllm#32097",
        f"<tool_call>now</tool_call><tool_call>f{_GLM_A1}</tool_call>",
        (("now", "{}"), A1),
    ),
    "no arguments, a line break": Sloppy(
        "glm45",
        "sgl-project/sglang#15333",
        "<tool_call>now\n</tool_call>",
        (("now", "{}"),),
    ),
    "spaces that mean something": Sloppy(
        "glm45",
        "sgl-project/sglang#20542",
        "<tool_call>f\n<arg_key> a </arg_key>\n<arg_value>    if x:\n        return 1\n</arg_value>"
        "\n</tool_call>",
        (("f", '{"a": "    if x:\\n        return 1\\n"}'),),
    ),
    "no tag before the first key": Sloppy(
        "glm45",
        "vllm-project/vllm#47190",
        "<tool_call>shellcmd</arg_key><arg_value>echo test</arg_value></tool_call>",
        (("shell", '{"cmd": "echo test"}'),),
    ),
    "a space for the tag before the first key": Sloppy(
        "glm45",
        "vllm-project/vllm#47190",
        f"<tool_call>f a</arg_key><arg_value>1</arg_value>{_GLM_B2}</tool_call>",
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    "the outer tag for the one of the first key": Sloppy(
        "glm45",
        "getsigit/sigit#95",
        "<tool_call>shell<tool_call>cmd</arg_key><arg_value>ls</arg_value></tool_call>",
        (("shell", '{"cmd": "ls"}'),),
    ),
    "no tag before a value": Sloppy(
        "glm45",
        "vllm-project/vllm#49248",
        "<tool_call>f<arg_key>a</arg_key>how many days</arg_value><arg_key>b</arg_key><arg_value>2"
        "</arg_value></tool_call>",
        (("f", '{"a": "how many days", "b": "2"}'),),
    ),
    "the end of a key twice": Sloppy(
        "glm45",
        "vllm-project/vllm#54971",
        "<tool_call>f<arg_key>a</arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        (A1,),
    ),
    "the beginning of a key twice": Sloppy(
        "glm45",
        "vllm-project/vllm#54971",
        "<tool_call>f<arg_key><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        (A1,),
    ),
    "no end of a key": Sloppy(
        "glm45", "", "<tool_call>f<arg_key>a<arg_value>1</arg_value></tool_call>", (A1,)
    ),
    "the end of a value within it": Sloppy(
        "glm45",
        "smg-project/smg#1942",
        f"<tool_call>f<arg_key>a</arg_key><arg_value>use </arg_value> in docs</arg_value>{_GLM_B2}"
        "</tool_call>",
        (("f", '{"a": "use </arg_value> in docs", "b": "2"}'),),
    ),
    "the tags of a call within a value": Sloppy(
        "glm45",
        "local-inference-lab/vllm#639",
        "<tool_call>f<arg_key>a</arg_key><arg_value><tool_call>x</tool_call> is a call\n"
        "</tool_call> too</arg_value></tool_call>So.",
        (("f", '{"a": "<tool_call>x</tool_call> is a call\\n</tool_call> too"}'),),
        "So.",
    ),
    "a value without its end, the call's next": Sloppy(
        "glm45",
        "unslothai/unsloth#5624",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\n<tool_call>f<arg_key>b</arg_key>"
        "<arg_value>2\n</tool_call>",
        (A1, B2),
    ),
    "a value without its end, a key next": Sloppy(
        "glm45",
        "",
        f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n{_GLM_B2}</tool_call>",
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    "no ends at all": Sloppy(
        "glm45",
        "ai-dynamo/dynamo#9355",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1",
        (A1,),
    ),
    "a call begins before the last one ended": Sloppy(
        "glm45",
        "",
        f"<tool_call>f{_GLM_A1}<tool_call>now<tool_call>f{_GLM_B2}",
        (A1, ("now", "{}"), B2),
    ),
    "a key without a value": Sloppy(
        "glm45", "", f"<tool_call>f<arg_key>b</arg_key>{_GLM_A1}<arg_key>x</tool_call>", (A1,)
    ),
    "an empty value": Sloppy(
        "glm45",
        "",
        "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value></tool_call>",
        (("f", '{"a": ""}'),),
    ),
    "JSON, as the history had it": Sloppy(
        "glm45",
        "ggml-org/llama.cpp#15186",
        '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>',
        (A1,),
    ),
    "a name before an object": Sloppy(
        "glm45",
        "Blaizzy/mlx-vlm#2207",
        '<tool_call>f {"a": "1"}</tool_call>\nSo.',
        (A1,),
        "So.",
    ),
    "values by their schemas": Sloppy(
        "glm45",
        "antirez/ds4#569",
        "<tool_call>typed<arg_key>count</arg_key><arg_value>10</arg_value><arg_key>tags</arg_key>"
        "<arg_value>[]</arg_value><arg_key>is_deep</arg_key><arg_value>true</arg_value><arg_key>"
        "level</arg_key><arg_value>2</arg_value></tool_call>",
        (("typed", '{"count": 10, "tags": [], "is_deep": true, "level": 2}'),),
    ),
    "texts that look like numbers": Sloppy(
        "glm45",
        "JustVugg/colibri#118",
        "<tool_call>typed<arg_key>plain</arg_key><arg_value>12345</arg_value><arg_key>mode</arg_key>"
        "<arg_value>1</arg_value><arg_key>new</arg_key><arg_value>7</arg_value></tool_call>",
        (("typed", '{"plain": "12345", "mode": "1", "new": "7"}'),),
    ),
    "a tag that is spoken of": Sloppy(
        "glm45",
        "",
        "Write <tool_call> first, then <arg_key>.",
        (),
        "Write <tool_call> first, then <arg_key>.",
    ),
}

_SEED, _SEED_END = "<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"
_SEED_A1 = f"{_SEED}f>\n<parameter=a>1</parameter>\n{_SEED_END}"
_SEED_B2 = f"{_SEED}f>\n<parameter=b>2</parameter>\n{_SEED_END}"

SEED = {
    "two calls and no thought": Sloppy(
        "seed_oss",
        "vllm-project/vllm#26573",
        f"I look.\n\n{_SEED_A1}\n\n{_SEED_B2}",
        (A1, B2),
        "I look.",
    ),
    "values by their schemas, in Python's words": Sloppy(
        "seed_oss",
        "vllm-project/vllm#32430",
        f"{_SEED}typed>\n<parameter=count>5</parameter>\n<parameter=is_deep>True</parameter>\n"
        "<parameter=place>{'x': None}</parameter>\n<parameter=plain>7</parameter>\n" + _SEED_END,
        (("typed", '{"count": 5, "is_deep": true, "place": {"x": null}, "plain": "7"}'),),
    ),
    "a value on lines of its own": Sloppy(
        "seed_oss",
        "vllm-project/vllm#46314",
        f"{_SEED}f>\n<parameter=a>\n  1\n\n</parameter>\n{_SEED_END}",
        (("f", '{"a": "  1\\n"}'),),
    ),
    "a last line break that means something": Sloppy(
        "seed_oss",
        "waybarrios/vllm-mlx#808",
        f"{_SEED}f>\n<parameter=a>DIRECT_OK\n</parameter>\n{_SEED_END}",
        (("f", '{"a": "DIRECT_OK\\n"}'),),
    ),
    "no arguments": Sloppy("seed_oss", "", f"{_SEED}now>\n{_SEED_END}", (("now", "{}"),)),
    "no outer tag": Sloppy(
        "seed_oss", "", f"<function=f>\n<parameter=a>1</parameter>\n{_SEED_END}So.", (A1,), "So."
    ),
    "no ends": Sloppy("seed_oss", "", f"{_SEED}f>\n<parameter=a>1", (A1,)),
    "a value without its end, the function's next": Sloppy(
        "seed_oss", "", f"{_SEED}f>\n<parameter=a>1\n{_SEED_END}{_SEED_B2}", (A1, B2)
    ),
    "a call begins before the last one ended": Sloppy(
        "seed_oss", "", f"{_SEED}f>\n<parameter=a>1</parameter>\n{_SEED_B2}", (A1, B2)
    ),
    "an object": Sloppy(
        "seed_oss",
        "",
        '<seed:tool_call>{"name": "f", "arguments": {"a": "1"}}</seed:tool_call>',
        (A1,),
    ),
    "the tags of Qwen": Sloppy(
        "seed_oss",
        "",
        "Write <tool_call> or <seed:tool_call>.",
        (),
        "Write <tool_call> or <seed:tool_call>.",
    ),
}

_BEGIN, _END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE_A1 = '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
_INVOKE_B2 = '<invoke name="f">\n<parameter name="b">2</parameter>\n</invoke>\n'

MINIMAX = {
    "two calls between one pair of tags": Sloppy(
        "minimax_m2",
        "smg-project/smg#1824",
        f"I look.\n{_BEGIN}\n{_INVOKE_A1}{_INVOKE_B2}{_END}",
        (A1, B2),
        "I look.",
    ),
    "tools that were not offered": Sloppy(
        "minimax_m2",
        "sgl-project/sglang#24995",
        f'{_BEGIN}\n<invoke name="none">\n</invoke>\n{_INVOKE_A1}<invoke name="x-y">\n'
        f"</invoke>\n{_END}",
        (("none", "{}"), A1, ("x-y", "{}")),
    ),
    "indented tags": Sloppy(
        "minimax_m2",
        "MiniMax-AI/MiniMax-M2.5#10",
        f'{_BEGIN}\n  <invoke name="shell">\n    <parameter name="cmd">ls</parameter>\n  '
        f"</invoke>\n{_END}",
        (("shell", '{"cmd": "ls"}'),),
    ),
    "no arguments": Sloppy(
        "minimax_m2",
        "sgl-project/sglang#36691",
        f'{_BEGIN}\n<invoke name="now"></invoke>\n{_END}',
        (("now", "{}"),),
    ),
    "the end of a parameter within it": Sloppy(
        "minimax_m2",
        "vllm-project/vllm#38803",
        f'{_BEGIN}<invoke name="f"><parameter name="a"><b></parameter> x</parameter>\n'
        f'<parameter name="b">2</parameter></invoke>{_END}',
        (("f", '{"a": "<b></parameter> x", "b": "2"}'),),
    ),
    "a bracket in a key": Sloppy(
        "minimax_m2",
        "vllm-project/vllm#38803",
        f'{_BEGIN}<invoke name="f"><parameter name="a>b">1</parameter></invoke>{_END}',
        (("f", '{"a>b": "1"}'),),
    ),
    "the outer end within a value": Sloppy(
        "minimax_m2",
        "ai-dynamo/frontend-crates#245",
        f'{_BEGIN}<invoke name="get-weather"><parameter name="city">Montréal {_END} café'
        f"</parameter>"
        f"</invoke>{_END}",
        (("get-weather", f'{{"city": "Montréal {_END} café"}}'),),
    ),
    "JSON between the tags of an older model": Sloppy(
        "minimax_m2",
        "MiniMax-AI/MiniMax-M2#14",
        '<tool_calls>\n{"name": "f", "arguments": {"a": "1"}}\n{"name": "now", "arguments": {}}\n'
        "</tool_calls>",
        (A1, ("now", "{}")),
    ),
    "texts that look like numbers": Sloppy(
        "minimax_m2",
        "smg-project/smg#1743",
        f'{_BEGIN}<invoke name="typed"><parameter name="plain">3</parameter>'
        f'<parameter name="version">'
        f'02134</parameter><parameter name="new">1e5</parameter></invoke>{_END}',
        (("typed", '{"plain": "3", "version": "02134", "new": "1e5"}'),),
    ),
    "values that may be null": Sloppy(
        "minimax_m2",
        "ml-explore/mlx-lm#1647",
        f'{_BEGIN}<invoke name="typed"><parameter name="name">weather</parameter>'
        '<parameter name="count">10</parameter><parameter name="tags">null</parameter></invoke>'
        f"{_END}",
        (("typed", '{"name": "weather", "count": 10, "tags": null}'),),
    ),
    "an integer with a point": Sloppy(
        "minimax_m2",
        "lablup/mlxcel#1336",
        f'{_BEGIN}<invoke name="typed"><parameter name="count">5.0</parameter></invoke>{_END}',
        (("typed", '{"count": 5}'),),
    ),
    "single quotes in an object": Sloppy(
        "minimax_m2",
        "cubist38/mlx-openai-server#124",
        f'{_BEGIN}<invoke name="typed"><parameter name="place">{{\'x\': 1}}</parameter>'
        f"</invoke>{_END}",
        (("typed", '{"place": {"x": 1}}'),),
    ),
    "a space at the end that means something": Sloppy(
        "minimax_m2",
        "sgl-project/sglang#32179",
        f'{_BEGIN}<invoke name="f"><parameter name="a">remember this \n</parameter></invoke>{_END}',
        (("f", '{"a": "remember this \\n"}'),),
    ),
    "a value on lines of its own": Sloppy(
        "minimax_m2",
        "",
        f'{_BEGIN}\n<invoke name="f">\n<parameter name="a">\n1\n</parameter>\n</invoke>\n{_END}',
        (A1,),
    ),
    "no outer tags": Sloppy("minimax_m2", "", f"Well.\n{_INVOKE_A1}So.", (A1,), "Well.So."),
    "no outer end": Sloppy("minimax_m2", "", f"{_BEGIN}\n{_INVOKE_A1}", (A1,)),
    "no ends of parameters": Sloppy(
        "minimax_m2",
        "",
        f'{_BEGIN}\n<invoke name="f">\n<parameter name="a">1\n<parameter name="b">2\n'
        f"</invoke>\n{_END}",
        (("f", '{"a": "1", "b": "2"}'),),
    ),
    "no ends at all": Sloppy(
        "minimax_m2", "", f'{_BEGIN}<invoke name="f"><parameter name="a">1', (A1,)
    ),
    "a call begins before the last one ended": Sloppy(
        "minimax_m2",
        "",
        f'{_BEGIN}\n<invoke name="f">\n<parameter name="a">1</parameter>\n{_INVOKE_B2}{_END}',
        (A1, B2),
    ),
    "a name without quotes": Sloppy(
        "minimax_m2",
        "",
        f"{_BEGIN}<invoke name=f><parameter name='a'>1</parameter></invoke>{_END}",
        (A1,),
    ),
    "tags that are spoken of": Sloppy(
        "minimax_m2",
        "smg-project/smg#2423",
        f'{_BEGIN} is a tag, <invoke name="f"> too.',
        (),
        f'{_BEGIN} is a tag, <invoke name="f"> too.',
    ),
}

_D = "｜DSML｜"
_DSML_A1 = (
    f'<{_D}invoke name="f">\n<{_D}parameter name="a" string="true">1'
    f"</{_D}parameter>\n</{_D}invoke>\n"
)
_DSML_B2 = _DSML_A1.replace('"a"', '"b"').replace(">1<", ">2<")
_V32, _V4 = f"<{_D}function_calls>\n", f"<{_D}tool_calls>\n"
_V32_END, _V4_END = f"</{_D}function_calls>", f"</{_D}tool_calls>"

DSML = {
    "two calls": Sloppy(
        "deepseek_v32",
        "ochafik/minja#11",
        f"Well.\n\n{_V32}{_DSML_A1}{_DSML_B2}{_V32_END}",
        (A1, B2),
        "Well.",
    ),
    "the outer tags of the next version": Sloppy(
        "deepseek_v32", "ml-explore/mlx-lm#1337", f"{_V4}{_DSML_A1}{_V4_END}", (A1,)
    ),
    "no outer tag": Sloppy("deepseek_v4", "vllm-project/vllm#48931", f"{_DSML_A1}{_V4_END}", (A1,)),
    "no outer end": Sloppy("deepseek_v32", "sgl-project/sglang#40236", f"{_V32}{_DSML_A1}", (A1,)),
    "a call that ends in its tag": Sloppy(
        "deepseek_v32",
        "sgl-project/sglang#40236",
        f'{_V32}<{_D}invoke name="now"/>\n{_DSML_A1}{_V32_END}',
        (("now", "{}"), A1),
    ),
    "a call without its end": Sloppy(
        "deepseek_v32",
        "sgl-project/sglang#40236",
        f'{_V32}<{_D}invoke name="now">\n{_V32_END} So.',
        (("now", "{}"),),
        "So.",
    ),
    "a parameter without the word and what it is": Sloppy(
        "deepseek_v32",
        "sgl-project/sglang#39435",
        f'I call.\n\n{_V4}<{_D}invoke name="typed">\n<parameter name="is_deep">true'
        f"</{_D}parameter>\n"
        f"</{_D}invoke>\n{_V4_END}",
        (("typed", '{"is_deep": true}'),),
        "I call.",
    ),
    "an object in the place of parameters": Sloppy(
        "deepseek_v32",
        "smg-project/smg#895",
        f'{_V32}<{_D}invoke name="f">\n{{"a": "1"}}\n</{_D}invoke>\n{_V32_END}',
        (A1,),
    ),
    "values by what is said of them": Sloppy(
        "deepseek_v32",
        "JustVugg/colibri#948",
        f'{_V32}<{_D}invoke name="typed">\n<{_D}parameter name="new" string="false">[1, "x"]'
        f'</{_D}parameter>\n<{_D}parameter name="version" string="true">5</{_D}parameter>\n'
        f'<{_D}parameter name="any" string="false">null</{_D}parameter>\n</{_D}invoke>\n{_V32_END}',
        (("typed", '{"new": [1, "x"], "version": "5", "any": null}'),),
    ),
    "values by their schemas, whatever is said": Sloppy(
        "deepseek_v32",
        "",
        f'{_V32}<{_D}invoke name="typed"><{_D}parameter name="count" string="true">5'
        f"</{_D}parameter>"
        f'<{_D}parameter name="plain" string="false">5</{_D}parameter></{_D}invoke>{_V32_END}',
        (("typed", '{"count": 5, "plain": "5"}'),),
    ),
    "a name that is none": Sloppy(
        "deepseek_v32",
        "vllm-project/vllm#54686",
        f'{_V32}<{_D}invoke name="record_item {{\ncategory: Dexes',
        (),
        f'{_V32}<{_D}invoke name="record_item {{\ncategory: Dexes',
    ),
    "a tag that is spoken of": Sloppy(
        "deepseek_v32",
        "vllm-project/vllm#55954",
        f'Write <{_D}invoke name="f">not a real call.',
        (),
        f'Write <{_D}invoke name="f">not a real call.',
    ),
    "tags without the word within a value": Sloppy(
        "deepseek_v32",
        "",
        f'{_V32}<{_D}invoke name="f">\n<{_D}parameter name="a" string="true"><invoke name="x">\n'
        f"</invoke></parameter></{_D}parameter>\n</{_D}invoke>\n{_V32_END}",
        (("f", '{"a": "<invoke name=\\"x\\">\\n</invoke></parameter>"}'),),
    ),
}

SLOPPY_TAGS = {
    f"{cases}, {name}": case
    for cases, group in {"glm": GLM, "seed": SEED, "minimax": MINIMAX, "dsml": DSML}.items()
    for name, case in group.items()
}
