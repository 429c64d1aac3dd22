"""Kernels as they are compiled for a processor without tiles (AMX): code for them would end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from llvmlite import binding
from numba.core.codegen import get_host_cpu_features

PROGRAM = """
import json

import torch

from ferryman.model.weights.linear import make_linear
from ferryman.model.weights.quantisation.products import int8_linear
from ferryman_kernels.attention.paged_attention import (
    paged_attention_decode,
    paged_attention_prefill,
)
from ferryman_kernels.cpu._tiles import has_tiles

torch.manual_seed(3)
weight, x = torch.randn(70, 64).bfloat16(), torch.randn(5, 64).bfloat16()
product = make_linear(weight)(x)
codes, ones = torch.randint(-127, 128, (70, 64)).to(torch.int8), torch.ones(70).bfloat16()
# What is left of these sums is the roundings on their way.
mirrored = torch.cat([x, x], 0)
codes[:, 32:], mirrored[:, 32:] = -codes[:, :32], mirrored[:, :32]
cancelling = int8_linear(codes, ones, None, torch.device("cpu"))
alone = torch.cat([cancelling(row[None]) for row in mirrored])
q, pages, table = torch.randn(5, 4, 64).bfloat16(), torch.randn(2, 2, 16, 64).bfloat16(), [[0, 1]]
prefilled = paged_attention_prefill(q, pages, pages, torch.tensor(table), ((13, 18),), 0.1)
positions = torch.arange(13, 18)
decoded = paged_attention_decode(q, pages, pages, torch.tensor(table * 5), positions, 0.1)
print(json.dumps({
    "has tiles": has_tiles(),
    "product": float((product.double() - x.double() @ weight.double().T).abs().max()),
    "equal": torch.equal(prefilled, decoded),
    "equal in int8": torch.equal(cancelling(mirrored), alone),
}))
"""


@pytest.mark.slow
def test_it_multiplies_and_attends_by_vectors(tmp_path: Path) -> None:
    features = [
        f"-{name[1:]}" if name[1:].startswith("amx") else name
        for name in str(get_host_cpu_features()).split(",")
    ]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": binding.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": ",".join(features),
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert not found["has tiles"]
    assert found["product"] < 0.2
    assert found["equal"]
    assert found["equal in int8"]
