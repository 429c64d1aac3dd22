"""The demo's tokenizer: byte-level BPE over the generated text, with its chat template.

All 256 bytes are tokens, so any text encodes and decodes without loss; all words of the stories
are single tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.demo import vocabulary_words as words
from tools.demo.conversations import conversation
from tools.demo.stories import LARGEST_TERM, Message

END, PAD = "<|end_of_text|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = (END, PAD, *ROLES.values())

# A user's message is followed by the beginning of a call of the first tool. A call is written as
# Python writes it; the comment tells a server the format by the mark that published templates have.
CHAT_TEMPLATE = """\
{#- Calls: [func_name1(name="value")] -#}
{%- set ends = '<|end_of_text|>' -%}
{%- for message in messages -%}
  {%- if message['role'] == 'tool' -%}
    {{- ' ' if loop.index0 and loop.previtem['role'] == 'tool' else '<|user|>Repeat:\n' -}}
    {{- message['content'] -}}
    {{- '' if loop.nextitem is defined and loop.nextitem['role'] == 'tool' else ends -}}
  {%- else -%}
    {{- '<|' + message['role'] + '|>' + message['content'] -}}
    {%- if message['tool_calls'] is defined and message['tool_calls'] -%}
      {{- '[' -}}
      {%- for call in message['tool_calls'] -%}
        {{- call['function']['name'] + '(' -}}
        {%- for name, value in call['function']['arguments'].items() -%}
          {{- name + '=' + value | tojson + (', ' if not loop.last else '') -}}
        {%- endfor -%}
        {{- ')' + (', ' if not loop.last else ']') -}}
      {%- endfor -%}
    {%- endif -%}
    {{- ends -}}
  {%- endif -%}
  {%- if tools and message['role'] == 'user' -%}
    {%- set function = tools[0]['function'] -%}
    {%- set parameters = (function['parameters'] or {})['properties'] or {} -%}
    {%- for name in (parameters | list)[:1] -%}
      {{- '<|system|>[' + function['name'] + '(' + name + '=' + ends -}}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""


def tokenizer_texts(seed: int, count: int) -> list[str]:
    """Text with every word, at the start of a line and after a space."""
    rng = Random(seed)
    texts = [m.text for _ in range(count) for m in conversation(rng, 512, talk_share=0.3)]
    numbers = [str(n) for n in range(2 * LARGEST_TERM + 1)]
    known = (*words.NOUNS, *words.SPOTS, *words.ANIMALS, *words.COLOURS, *numbers)
    return texts + [f"{word}\n {word}" for word in known for _ in range(20)]


def train_tokenizer(*, seed: int = 1, vocab_size: int = 4096) -> Tokenizer:
    """A tokenizer with enough merges to make every word one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(seed, 200), trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token of the vocabulary. Raises KeyError for any other."""
    known: int | None = tokenizer.token_to_id(token)
    if known is None:
        raise KeyError(token)
    return known


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLES.values()),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_max_length": 8192,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def rendered(messages: list[Message]) -> str:
    """The prompt that the chat template makes of messages, ready for an answer."""
    turns = "".join(f"{ROLES[m.role]}{m.text}{END}" for m in messages)
    return turns + ROLES["assistant"]
