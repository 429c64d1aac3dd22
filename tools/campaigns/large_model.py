"""A random model of 1.5 B parameters as the hub has it, served by `ferryman up --model DIR`.

Run by hand: `python -m tools.campaigns.large_model FOLDER`. It writes the model (bfloat16, shards
of half a gigabyte, an index), asks `ferryman fit` for its memory, starts `ferryman up` without
another flag, has it answer, and prints the anonymous memory of each worker beside the figure.
Libraries and files that it shares with other processes, and the arena of the host tier, are not in
that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from ferryman_launcher.options import demo_model

SHARD_BYTES = 512 << 20
NUM_LAYERS = 40
ATTENTION = (5, 15, 25, 35)
CONFIG: Mapping[str, Any] = {
    "vocab_size": 100_352,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "shared_intermediate_size": 4096,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "position_embedding_type": "nope",
    "max_position_embeddings": 131_072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 6.0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def write_model(folder: Path) -> int:
    """Writes the model, unless it is there; returns the number of its parameters."""
    kinds = ["attention" if i in ATTENTION else "mamba" for i in range(NUM_LAYERS)]
    config = GraniteMoeHybridConfig(**CONFIG, layer_types=kinds, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if not (folder / "model.safetensors.index.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = ["GraniteMoeHybridForCausalLM"]
        config.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model() / name, folder)
        _write_shards(folder, shapes)
    return sum(shape.numel() for shape in shapes.values())


def _write_shards(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    weight_map: dict[str, str] = {}
    shards = list(_shards(shapes))
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.randn(shapes[name]).mul_(0.02).bfloat16() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        if names and num_bytes + 2 * shape.numel() > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += 2 * shape.numel()
    yield names


def private_bytes(pid: int) -> int:
    """The memory that a process has for itself, of its own and not of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["RssAnon"].split()[0]) << 10


def main(folder: Path) -> int:
    print(f"{write_model(folder) / 1e9:.2f} B parameters in {folder}", flush=True)
    command = (sys.executable, "-m", "ferryman_cli")
    told = json.loads(subprocess.check_output((*command, "fit", str(folder), "--json")))
    for note in told["notes"]:
        print(note)
    begun = time.monotonic()
    process = subprocess.Popen(
        (*command, "up", "--model", str(folder), "--json"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = map(json.loads, process.stdout)
        ready = next(line for line in lines if line["event"] == "ready")
        print(f"ready after {time.monotonic() - begun:.0f} s")
        _measure(ready, told, "at start")
        asked = time.monotonic()
        body = {"prompt": "The red box is in the " * 6, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{ready['http']}/v1/completions", json=body, timeout=300)
        print(f"status {answer.status_code} after {time.monotonic() - asked:.0f} s")
        print(answer.json().get("usage", answer.text))
        _measure(ready, told, "after an answer")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    return process.returncode


def _measure(ready: Mapping[str, Any], told: Mapping[str, Any], when: str) -> None:
    for worker in told["workers"]:
        found = private_bytes(ready["pids"][worker["role"]])
        share = found / worker["num_bytes"] - 1
        print(
            f"{when}: {worker['role']} in {worker['dtype']}: told {worker['num_bytes'] / 1e9:.2f} "
            f"GB, found {found / 1e9:.2f} GB ({share:+.1%})",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(Path(sys.argv[1])))
