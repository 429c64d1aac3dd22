"""llama.cpp computes of a file what we do: it is the oracle of what a file's keys mean."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tests.gguf_models.hybrid_conversion import write_hybrid
from tests.gguf_models.hybrid_models import HYBRIDS
from tests.model.paged_run import PagedRun, Part
from tests.tiny_models import save_random
from tools.bench.contender_process import LLAMA_CPP, contender_process

from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman_bench.engine_process import BenchModel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama.cpp is not installed: pip install 'ferryman[peers]'",
)

PROMPT = [(7 * place * place + 3) % 131 for place in range(40)]
# llama.cpp rounds the ends of YaRN's ramp, as published gpt-oss does not, and ends the process when
# it makes room for this dots1.
UNLIKE = {"gpt-oss", "dots1"}


@pytest.mark.parametrize("name", sorted(HYBRIDS.keys() - UNLIKE))
def test_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    architecture, config = HYBRIDS[name]
    folder = save_random(tmp_path / "folder", config, seed=1)
    keys = {f"{architecture}.vocab_size": config.vocab_size, "tokenizer.ggml.model": "none"}
    file = write_hybrid(folder, tmp_path / "tiny.gguf", architecture, keys)
    run = PagedRun(load_model(file, LoadOptions("float64", page_size=16)))
    ours = run.prefill([Part(run.start(), PROMPT)])[0][-1]
    # llama.cpp ends its process for a file that it does not take.
    with contender_process(LLAMA_CPP, BenchModel(file, "float32", threads=1)) as llama:
        theirs = llama.ask(do="logits", token_ids=PROMPT)["logits"]
    difference = (ours - torch.tensor(theirs, dtype=torch.float64)).abs().max()
    assert difference <= 1e-4 * ours.abs().max(), difference
