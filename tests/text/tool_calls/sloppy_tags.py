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

SLOPPY_TAGS = {
    f"{cases}, {name}": case
    for cases, group in {"glm": GLM, "seed": SEED}.items()
    for name, case in group.items()
}
