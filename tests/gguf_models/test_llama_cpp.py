"""llama.cpp computes of a file what we do: it is the oracle of what a file's keys mean."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.gguf_models.conversion import write_converted
from tests.gguf_models.files import WrittenTensor, write
from tests.gguf_models.hybrid_conversion import hybrid_parts
from tests.gguf_models.hybrid_models import HYBRIDS
from tests.gguf_models.test_architectures import MODELS
from tests.model.paged_run import PagedRun, Part
from tests.tiny_models import save_random
from tools.bench.contender_process import LLAMA_CPP, contender_process
from tools.bench.gguf.container import Setting
from transformers import Gemma3nTextConfig, PretrainedConfig

from ferryman.model.families import gemma3n
from ferryman.model.families.gemma3n import SparseGelu
from ferryman.model.layers import token_input
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman_bench.engine_process import BenchModel
from ferryman_kernels.elementwise.activations import gelu_tanh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama.cpp is not installed: pip install 'ferryman[peers]'",
)

PROMPT = [(7 * place * place + 3) % 131 for place in range(40)]
# llama.cpp rounds the ends of YaRN's ramp, as published gpt-oss does not, and ends the process when
# it makes room for this dots1.
UNLIKE = {"gpt-oss", "dots1"}
# It takes GELU from a table in float16; this Gemma 3n has 22 layers.
GELU = 5e-4
ROUNDED_MORE = {"gemma4": GELU, "gemma3n": 2e-3, "starcoder2": GELU, "gptneox": GELU, "phi2": GELU}
PLAIN = (
    *("seed_oss", "ernie4_5", "hunyuan-dense", "olmo2", "olmo2 of OLMo 3", "exaone4"),
    *("olmo", "stablelm", "stablelm side by side", "starcoder2", "gptneox", "cohere2", "phi2"),
    *("olmoe", "hunyuan-moe"),
)
"""Models of `test_architectures.py`. llama.cpp has windows in EXAONE 4 if there are 64 layers, and
none in Phi 3, whose factors it takes by the context that it is opened with. It wants keys in files
of ERNIE with experts, MiniMax-M2 and Qwen3-VL that `conversion.py` does not write."""


@pytest.mark.parametrize("name", sorted(HYBRIDS.keys() - UNLIKE))
def test_logits_are_those_of_llama_cpp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, config = HYBRIDS[name]
    config = as_llama_has_it(config) if architecture == "gemma3n" else config
    folder = save_random(tmp_path / "folder", config, seed=1)
    keys = {f"{architecture}.vocab_size": config.vocab_size, "tokenizer.ggml.model": "none"}
    metadata, tensors = hybrid_parts(folder, architecture, keys)
    if architecture == "gemma3n":
        monkeypatch.setattr(SparseGelu, "__call__", sparse_gelu_of_llama)
        for module in (gemma3n, token_input):
            monkeypatch.setattr(module, "gelu_tanh", gelu_of_llama)
        tensors += [unused for layer in (20, 21) for unused in keys_of_layer(tensors, layer)]
    file = write(tmp_path / "tiny.gguf", metadata, tensors)
    assert_same_logits(file, ROUNDED_MORE.get(architecture, 1e-4))


def as_llama_has_it(config: PretrainedConfig) -> PretrainedConfig:
    """Gemma 3n with the sizes that llama.cpp's code has for all of them: layers from the 20th on
    read pages of others."""
    sizes = {
        "num_hidden_layers": 22,
        "intermediate_size": 96,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4
        + ["sliding_attention"] * 2,
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "vocab_size_per_layer_input": config.vocab_size,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
    }
    return Gemma3nTextConfig(**{**config.to_dict(), **sizes})


def sparse_gelu_of_llama(act: SparseGelu, gate: torch.Tensor) -> torch.Tensor:
    """The gate with a deviation of n - 1 channels, where published code divides by n."""
    cutoff = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True) * act.deviations
    return gelu_of_llama((gate - cutoff).relu())


def gelu_of_llama(gate: torch.Tensor) -> torch.Tensor:
    """GELU from a table in float16."""
    return gelu_tanh(gate.half().to(gate)).half().to(gate)


def keys_of_layer(tensors: Sequence[WrittenTensor], layer: int) -> Iterator[WrittenTensor]:
    """Keys and values of a layer that reads others' pages: published models have them, and
    llama.cpp wants them."""
    for tensor in tensors:
        if tensor.name.startswith(("blk.19.attn_k", "blk.19.attn_v")):
            yield replace(tensor, name=tensor.name.replace("blk.19.", f"blk.{layer}."))


def assert_same_logits(file: Path, tolerance: float) -> None:
    run = PagedRun(load_model(file, LoadOptions("float64", page_size=16)))
    ours = run.prefill([Part(run.start(), PROMPT)])[0][-1]
    # llama.cpp ends its process for a file that it does not take.
    with contender_process(LLAMA_CPP, BenchModel(file, "float32", threads=1)) as llama:
        theirs = llama.ask(do="logits", token_ids=PROMPT)["logits"]
    difference = (ours - torch.tensor(theirs, dtype=torch.float64)).abs().max()
    assert difference <= tolerance * ours.abs().max(), difference


@pytest.mark.parametrize("name", PLAIN)
def test_logits_of_transformers_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    folder, architecture = save_random(tmp_path / "folder", MODELS[name], seed=1), name.split()[0]
    keys: dict[str, Setting] = {f"{architecture}.vocab_size": 131, "tokenizer.ggml.model": "none"}
    file = write_converted(folder, tmp_path / "tiny.gguf", architecture, keys)
    assert_same_logits(file, ROUNDED_MORE.get(architecture, 1e-4))
