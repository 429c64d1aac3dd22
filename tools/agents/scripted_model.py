"""A hybrid model that follows a script: the real thing but for its knowledge.

It has layers of Mamba-2 and of attention with random weights, whose results are scaled down so far
that the last token alone decides which one is next. Its tokenizer is a published one of 151,643
tokens, so prompts of agents are as long as they are elsewhere. Its chat template shows tools and
results as Qwen's models know them, and ends with a *cue*: a control token behind which the script
goes on. The cue for the answer is only given if a tool's result has the word that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tools.agents.script import Script, pieces_of, successors
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

WORD = "heron"
ANSWER = f"The word is {WORD}!"
_END = "<|im_end|>"
_SCALE = 40.0  # of the right token's logit; all others are near zero
_SPACES = ((" ", "Ġ"), ("\n", "Ċ"))  # as byte-level vocabularies write them
_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what the last command of mini-swe-agent prints

# By the tools that agents have. Qwen Code's shell sometimes loses what a short command printed.
CALLS = {
    "grep_search": """[grep_search(pattern=".")]""",
    "exec_command": """[exec_command(cmd="cat ./note.txt")]""",
    "Bash": """[Bash(command='head note.txt')]""",
    "bash": """[bash(command = 'tail note.txt')]""",
    "search_codebase": """[search_codebase(queries=["er"])]""",
}
# An edit as aider knows it: a line more in a program, which has to be run to say the word.
EDIT = """\
word.sh
```
<<<<<<< SEARCH
=======
echo The word is $(cat note.txt)!
>>>>>>> REPLACE
```
"""
SCRIPTS = (
    Script("<|answer|>", ANSWER),
    Script("<|no_word|>", "No result of a tool has that word"),
    Script("<|no_tools|>", "Reading a note"),
    *(Script(f"<|call_{tool}|>", call) for tool, call in CALLS.items()),
    Script("<|submit|>", f"[bash(command='echo {_SUBMIT}; echo The word is $(cat note.txt)!')]"),
    Script("<|final|>", f'[final_answer(answer="{ANSWER}")]'),
    Script("<|code|>", """<code>\nprint(bash("cat note.txt"))\n</code>"""),
    Script("<|final_code|>", f"""<code>\nfinal_answer("{ANSWER}")\n</code>"""),
    Script("<|edit|>", EDIT),
)

# An agent that has no role for a tool's result gives it as an observation of its user.
TEMPLATE = (
    """\
{%- set turn = namespace(called=false, read=false, shown=false, way='<|answer|>') %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'Call them like this: [func_name1(params_name1=params_value1)]<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set text = message.content or '' %}
    {%- if message.role == 'user' %}
        {%- set turn.called = false %}
        {%- set turn.read = false %}
        {%- if 'SUBMIT' in text %}{%- set turn.way = '<|submit|>' %}{%- endif %}
        {%- if 'WORD' in text %}{%- set turn.shown = true %}{%- endif %}
    {%- endif %}
    {%- if message.role == 'tool' or text.startswith('Observation:') and 'New task:' not in text %}
        {%- set turn.called = true %}
        {%- if 'WORD' in text %}{%- set turn.read = true %}{%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text }}
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
        {%- elif tool.function.name == 'final_answer' %}
            {%- set turn.way = '<|final|>' %}
        {%- endif %}
    {%- endfor %}
    {%- set order = messages[0].content or '' %}
    {%- if not tools and '<code>' in order %}
        {%- set cue.name = '<|code|>' %}
        {%- set turn.way = '<|final_code|>' %}
    {%- elif not tools and 'SEARCH/REPLACE' in order and turn.shown %}
        {%- set cue.name = '<|edit|>' %}
    {%- endif %}
    {%- if turn.called %}
        {%- set cue.name = turn.way if turn.read else '<|no_word|>' %}
    {%- endif %}
    {{- cue.name }}
{%- endif %}
""".replace("WORD", WORD)
    .replace("SUBMIT", _SUBMIT)
    .replace("TOOLS", json.dumps(list(CALLS)))
)


def save_scripted_model(folder: Path, tokenizer: Path) -> Path:
    """Writes the model into `folder`, with the published tokenizer of the folder `tokenizer`."""
    folder.mkdir(parents=True)
    words: dict[str, Any] = json.loads((tokenizer / "tokenizer.json").read_text())
    pieces = pieces_of(SCRIPTS, _plain_text(words["model"]["vocab"]))
    vocabulary = _with_pieces(words, chain.from_iterable(pieces.values()))
    control = _with_cues(words)
    config: dict[str, Any] = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "additional_special_tokens": None}
    config.pop("added_tokens_decoder", None)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    _save_weights(folder, successors(pieces, vocabulary, control, control[_END]), control[_END])
    return folder


def _plain_text(vocab: Mapping[str, int]) -> dict[str, int]:
    """The tokens of printable ASCII, spaces and line breaks, by their characters."""
    plain = {}
    for text, token in vocab.items():
        for space, sign in _SPACES:
            text = text.replace(sign, space)
        plain[text] = token
    return {text: token for text, token in plain.items() if text.isascii()}


def _with_pieces(words: dict[str, Any], pieces: Iterable[str]) -> dict[str, int]:
    """Adds those pieces that a tokenizer lacks, and returns the ids of its plain text. No prompt is
    read by them: no pair of tokens makes one."""
    vocab = words["model"]["vocab"]
    plain = _plain_text(vocab)
    lacking = [piece for piece in pieces if piece not in plain]
    for token, piece in enumerate(lacking, start=len(vocab)):
        for space, sign in _SPACES:
            piece = piece.replace(space, sign)
        vocab[piece] = token
    return _plain_text(vocab)


def _with_cues(words: dict[str, Any]) -> dict[str, int]:
    """Adds the cues to a tokenizer's control tokens, and returns the ids of all of them, which
    follow those of plain text."""
    added = words["added_tokens"]
    pattern = next(token for token in added if token["content"] == _END)
    added += [{**pattern, "content": script.cue} for script in SCRIPTS]
    for token, entry in enumerate(added, start=len(words["model"]["vocab"])):
        entry["id"] = token
    return {entry["content"]: entry["id"] for entry in added}


def _config(vocab_size: int, end: int) -> GraniteMoeHybridConfig:
    return GraniteMoeHybridConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=131_072,
        position_embedding_type="nope",
        mamba_n_heads=8,
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
