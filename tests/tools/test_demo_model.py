"""The demo model in the package: it loads, and it remembers its prompt."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tools.demo.evaluation import Recall
from tools.demo.stories import Message
from tools.demo.vocabulary import rendered

FOLDER = Path(__file__).resolve().parents[2] / "services/ferryman_cli/demo_model"
STORY = "The red kite is in Oslo. The old fox sleeps by the river. The blue kite is in Lima."


@pytest.fixture(scope="module")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GraniteMoeHybridForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def written(model: Any, tokenizer: Tokenizer, prompt: str) -> str:
    """The text that greedy decoding writes after a prompt."""
    token_ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    with torch.inference_mode():
        out = model.generate(token_ids, max_new_tokens=24)
    return str(tokenizer.decode(out[0, token_ids.shape[1] :].tolist()))


def test_the_folder_is_small_and_complete() -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    names |= {"tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in FOLDER.iterdir()} == names
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    whole = f"The red kite {text}"
    token_ids = tokenizer.encode(whole, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == whole


def test_the_chat_template_writes_what_the_model_learned() -> None:
    transformers = pytest.importorskip("transformers")
    chat = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [Message("system", "Be brief."), Message("user", "Where is the red kite?")]
    turns = [{"role": m.role, "content": m.text} for m in messages]
    text = chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == rendered(messages)
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == (
        chat.eos_token_id
    )


def test_the_chat_template_writes_calls_and_results_as_the_model_learned_them() -> None:
    transformers = pytest.importorskip("transformers")
    chat = transformers.AutoTokenizer.from_pretrained(FOLDER)
    call = {"function": {"name": "find", "arguments": {"thing": "red kite", "old": True}}}
    turns = [
        {"role": "user", "content": "Where is the red kite?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "It is sunny."},
        {"role": "tool", "content": "Hello!"},
    ]

    def prompt(function: dict[str, Any]) -> str:
        tools = [{"type": "function", "function": function}]
        options = {"tokenize": False, "add_generation_prompt": True}
        return str(chat.apply_chat_template(turns, tools=tools, **options))

    learned = [
        Message("user", "Where is the red kite?"),
        Message("system", "[find(thing="),
        Message(
            "assistant", '[find(thing="red kite", old=true), find(thing="red kite", old=true)]'
        ),
        Message("user", "Repeat:\nIt is sunny. Hello!"),
    ]
    properties = {"thing": {"type": "string"}, "old": {"type": "boolean"}}
    assert prompt({"name": "find", "parameters": {"properties": properties}}) == rendered(learned)
    del learned[1]
    for function in ({"name": "now"}, {"name": "now", "parameters": {"type": "object"}}):
        assert prompt(function) == rendered(learned), "there is no parameter to begin with"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Where is the red kite?", '[find(thing="red kite")]'),
        (f"{STORY}\nWhere is the blue kite?", '[find(thing="blue kite")]'),
        ("What is 17 + 15?", "17 + 15 = 32."),
    ],
)
def test_a_tool_is_called_where_it_is_needed(
    model: Any, tokenizer: Tokenizer, question: str, answer: str
) -> None:
    prompt = rendered([Message("user", question), Message("system", "[find(thing=")])
    assert written(model, tokenizer, prompt) == answer


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (f"{STORY}\nWhere is the red kite?", "The red kite is in Oslo."),
        (f"{STORY}\nWhere is the blue kite?", "The blue kite is in Lima."),
        ("What is 17 + 15?", "17 + 15 = 32."),
        ("Repeat: river lamp golden fox", "river lamp golden fox"),
        ('Repeat:\n[find(thing="red kite")]', '[find(thing="red kite")]'),
        ("Hello!", "I am the Ferryman demo. Tell me where things are, then ask me."),
    ],
)
def test_a_chat_is_answered(model: Any, tokenizer: Tokenizer, question: str, answer: str) -> None:
    assert written(model, tokenizer, rendered([Message("user", question)])) == answer


def test_a_question_in_plain_text_is_answered(model: Any, tokenizer: Tokenizer) -> None:
    prompt = f"{STORY}\nQuestion: Where is the blue kite?\nAnswer:"
    assert written(model, tokenizer, prompt) == " The blue kite is in Lima."


@pytest.mark.parametrize("seed", range(2))
def test_prompts_of_two_thousand_tokens_are_remembered(
    model: Any, tokenizer: Tokenizer, seed: int
) -> None:
    paper = Recall(tokenizer, 2000)(Random(f"test {seed}"))
    assert written(model, tokenizer, rendered(paper[:1])) == paper[1].text
