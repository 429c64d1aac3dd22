"""Answers of Kimi as it really wrote them (`sloppy.py`)."""

from __future__ import annotations

from tests.text.tool_calls.sloppy import A1, B2, Sloppy

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_A1 = f'{CALL}functions.f:0{ARGUMENTS}{{"a": "1"}}{CALL_END}'
_B2 = f'{CALL}functions.f:1{ARGUMENTS}{{"b": "2"}}{CALL_END}'

KIMI = {
    "two calls": Sloppy(
        "kimi_k2",
        "vllm-project/vllm#24478",
        f"I look. {SECTION}{_A1}{_B2}{SECTION_END}",
        (A1, B2),
        "I look.",
    ),
    "spaces between the marks": Sloppy(
        "kimi_k2",
        "vybestack/llxprt-code#749",
        f'{SECTION} {CALL} functions.f:0 {ARGUMENTS} {{"a": "1"}} {CALL_END} {SECTION_END}',
        (A1,),
    ),
    "marks of one call": Sloppy(
        "kimi_k2",
        "ggml-org/llama.cpp#17376",
        f"<|tool_call_section_begin|>{_A1}<|tool_call_section_end|>",
        (A1,),
    ),
    "no mark of the section": Sloppy("kimi_k2", "vllm-project/vllm#32216", f"{_A1}{_B2}", (A1, B2)),
    "no marks of a call": Sloppy(
        "kimi_k2",
        "lablup/mlxcel#766",
        f'{SECTION}functions.f:0{ARGUMENTS}{{"a": "1"}}{SECTION_END}',
        (A1,),
    ),
    "a hyphen in the name": Sloppy(
        "kimi_k2",
        "vllm-project/vllm#22149",
        f'{CALL}functions.get-weather:0{ARGUMENTS}{{"city": "Oslo"}}{CALL_END}',
        (("get-weather", '{"city": "Oslo"}'),),
    ),
    "an id with other characters": Sloppy(
        "kimi_k2",
        "exo-explore/exo#2281",
        f'{SECTION}{CALL}functions_f_1{ARGUMENTS}{{"a": "1"}}{CALL_END}{SECTION_END}',
        (A1,),
    ),
    "an id of letters and digits": Sloppy(
        "kimi_k2",
        "sgl-project/sglang#21377",
        f'{SECTION}{CALL}functionsf5{ARGUMENTS}{{"a": "1"}}{CALL_END}{CALL}functionsnow6{ARGUMENTS}'
        f"{{}}{CALL_END}{SECTION_END}",
        (A1, ("now", "{}")),
    ),
    "an id without the word": Sloppy(
        "kimi_k2",
        "thinking-machines-lab/tinker-cookbook#248",
        f'{SECTION}{CALL}f:0{ARGUMENTS}{{"a": "1"}}{CALL_END}{SECTION_END}',
        (A1,),
    ),
    "an id without a number": Sloppy(
        "kimi_k2",
        "unslothai/unsloth#5624",
        f'{CALL}functions.web_search{ARGUMENTS}{{"q": "x"}}',
        (("web_search", '{"q": "x"}'),),
    ),
    "tags within a string": Sloppy(
        "kimi_k2",
        "vllm-project/vllm#24847",
        f'{SECTION}{CALL}functions.f:0{ARGUMENTS}{{"a": "<div>{CALL_END}</div>"}}{CALL_END}',
        (("f", f'{{"a": "<div>{CALL_END}</div>"}}'),),
    ),
    "single quotes and Python's words": Sloppy(
        "kimi_k2",
        "lablup/mlxcel#783",
        f"{SECTION}{CALL}functions.f:0{ARGUMENTS}{{'a': 'x', 'c': True}}{CALL_END}{SECTION_END}",
        (("f", '{"a": "x", "c": true}'),),
    ),
    "no arguments": Sloppy(
        "kimi_k2",
        "",
        f"{SECTION}{CALL}functions.now:0{ARGUMENTS}{CALL_END}{CALL}functions.now:1{CALL_END}",
        (("now", "{}"), ("now", "{}")),
    ),
    "no mark before the arguments": Sloppy(
        "kimi_k2", "", f'{CALL}functions.f:0 {{"a": "1"}}{CALL_END}So.', (A1,), "So."
    ),
    "a call begins before the last one ended": Sloppy(
        "kimi_k2",
        "",
        f'{CALL}functions.f:0{ARGUMENTS}{{"a": "1"}}{CALL}functions.now:1{ARGUMENTS}',
        (A1, ("now", "{}")),
    ),
    "marks that are spoken of": Sloppy(
        "kimi_k2", "", f"{SECTION} comes before {CALL}.", (), f"{SECTION} comes before {CALL}."
    ),
}

SLOPPY_KIMI = {f"kimi, {name}": case for name, case in KIMI.items()}
