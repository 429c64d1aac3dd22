"""A hybrid model that follows a script: the real thing but for its knowledge.

It has layers of Mamba-2 and of attention with random weights, whose results are scaled down so far
that the last token alone decides which one is next. Its tokenizer is a published one of 151,643
tokens, so prompts of agents are as long as they are elsewhere. Its chat template shows tools and
results as Qwen's models know them, and ends with a *cue*: a control token behind which the script
goes on. The cue for the answer is only given if a tool's result has the word that was asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tools.agents.script import Script, successors
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

WORD = "heron"
ANSWER = f"The word is {WORD}!"
_END = "<|im_end|>"
_SCALE = 40.0  # of the right token's logit; all others are near zero
_SPACES = {"Ġ": " ", "Ċ": "\n"}  # as byte-level vocabularies write them

# By the tools that agents have. Commands are spelled apart so that each call can be cut into tokens
# that no other has. Qwen Code's shell sometimes loses what a short command printed.
CALLS = {
    "grep_search": """[grep_search(pattern=".")]""",
    "exec_command": """[exec_command(cmd="cat ./note.txt")]""",
    "Bash": """[Bash(command='head note.txt')]""",
    "bash": """[bash(command = 'tail note.txt')]""",
    "search_codebase": """[search_codebase(queries=["er"])]""",
}
SCRIPTS = (
    Script("<|answer|>", ANSWER),
    Script("<|no_word|>", "No result of a tool has that word"),
    Script("<|no_tools|>", "Reading a note"),
    *(Script(f"<|call_{tool}|>", call) for tool, call in CALLS.items()),
)

TEMPLATE = """\
{%- set turn = namespace(called=false, read=false) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call them like this: [func_name1(params_name1=params_value1)]<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set turn.called = false %}
        {%- set turn.read = false %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {%- set turn.called = true %}
        {%- if 'WORD' in message.content %}{%- set turn.read = true %}{%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '[' + call.function.name + '(' + call.function.arguments | tojson + ')]' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- set cue = namespace(name='<|no_tools|>') %}
    {%- for tool in tools or [] %}
        {%- if tool.function.name in TOOLS %}
            {%- set cue.name = '<|call_' + tool.function.name + '|>' %}
        {%- endif %}
    {%- endfor %}
    {%- if turn.called %}
        {%- set cue.name = '<|answer|>' if turn.read else '<|no_word|>' %}
    {%- endif %}
    {{- cue.name }}
{%- endif %}
""".replace("WORD", WORD).replace("TOOLS", json.dumps(list(CALLS)))


def save_scripted_model(folder: Path, tokenizer: Path) -> Path:
    """Writes the model into `folder`, with the published tokenizer of the folder `tokenizer`."""
    folder.mkdir(parents=True)
    words: dict[str, Any] = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = _plain_text(words["model"]["vocab"])
    control = _with_cues(words)
    config: dict[str, Any] = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "additional_special_tokens": None}
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _save_weights(folder, successors(SCRIPTS, vocabulary, control, control[_END]), control[_END])
    return folder


def _plain_text(vocab: dict[str, int]) -> dict[str, int]:
    """The tokens of printable ASCII, spaces and line breaks, by their characters."""
    plain = {
        "".join(_SPACES.get(sign, sign) for sign in text): token for text, token in vocab.items()
    }
    return {text: token for text, token in plain.items() if text.isascii()}


def _with_cues(words: dict[str, Any]) -> dict[str, int]:
    """Adds the cues to a tokenizer's control tokens, and returns the ids of all of them."""
    added = words["added_tokens"]
    first = max(token["id"] for token in added) + 1
    pattern = next(token for token in added if token["content"] == _END)
    added += [
        {**pattern, "id": first + row, "content": script.cue} for row, script in enumerate(SCRIPTS)
    ]
    return {token["content"]: token["id"] for token in added}


def _config(vocab_size: int, end: int) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=131_072,
        position_embedding_type="nope",
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_state=16,
        mamba_expand=2,
        num_local_experts=0,
        shared_intermediate_size=128,
        residual_multiplier=0.001,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=end,
        tie_word_embeddings=False,
    )


def _save_weights(folder: Path, follower: dict[int, int], end: int) -> None:
    """Random layers between an embedding with a direction for each token of the scripts and a head
    in which each direction means the next one; tokens of no script share one, which means `end`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        vocab_size = -(-(max(follower) + 1) // 64) * 64
        model = AutoModelForCausalLM.from_config(_config(vocab_size, end), dtype=torch.float32)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert len(follower) < embedding.shape[1], "a direction for each token of the scripts"
        embedding.zero_()
        head.zero_()
        embedding[:, 0] = 1.0
        head[end, 0] = _SCALE
        for direction, (token, after) in enumerate(follower.items(), start=1):
            embedding[token, 0], embedding[token, direction] = 0.0, 1.0
            head[after, direction] = _SCALE
    model.to(torch.bfloat16).save_pretrained(folder)
