"""Models with `kv_dtype=fp8`: their state is what e4m3 pages hold, however it is reused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.differences import difference
from tests.model.paged_run import PagedRun, Part
from tests.native import native_config, save_native
from tests.tiny_models import save_tiny_model
from torch import Tensor

from ferryman.cache.manifest import Kind
from ferryman.errors import ConfigError
from ferryman.llm import LLM, Completion
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes import state
from ferryman.model.shapes.manifest import state_manifest
from ferryman.schedule.request import SamplingParams
from ferryman_kernels.attention.pages import write_kv
from ferryman_kernels.products.packed_product import reads_panels

PROMPT = [(7 * i * i + 3 * i) % 120 + 3 for i in range(75)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_native(tmp_path_factory.mktemp("model"), native_config())


def nearest(rows: Tensor) -> Tensor:
    """Each row [..., head_dim] with a power of two as its scale, and the nearest e4m3 numbers."""
    scales = (rows.abs().amax(-1, keepdim=True) / 448).log2().ceil().exp2()
    distances = (rows[..., None] / scales[..., None] - NUMBERS).abs().nan_to_num(torch.inf)
    return NUMBERS[distances.argmin(-1)] * scales


def logits(folder: Path, kv_dtype: str) -> list[Tensor]:
    """Of chunks of a prompt, then of a decode step."""
    model = load_model(folder, LoadOptions("float64", page_size=16, kv_dtype=kv_dtype))
    run = PagedRun(model)
    lane = run.start()
    chunks = [run.prefill([Part(lane, PROMPT[a:b])])[0] for a, b in ((0, 32), (32, 60))]
    return [*chunks, run.decode([lane], PROMPT[60:61])]


def test_the_state_is_the_nearest_e4m3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = logits(folder, "fp8"), logits(folder, "auto")

    def write(self: state.AttentionState, keys: Tensor, values: Tensor, *where: Tensor) -> None:
        write_kv(self.key_pages, self.value_pages, nearest(keys), nearest(values), *where)

    monkeypatch.setattr(state.AttentionState, "write", write)
    expected = logits(folder, "auto")
    for some, others, unrounded in zip(found, expected, plain, strict=True):
        assert difference(some, others) < 1e-12
        assert difference(some, unrounded) > 1e-4, "rounding shows"


def test_a_page_has_the_same_bytes_in_whatever_steps_it_was_filled(folder: Path) -> None:
    """Also where a decode step writes its last token. Bytes, not answers: other workers reuse
    them."""
    found = []
    for cuts in ((64,), (16, 48, 64), (7, 33, 63)):
        model = load_model(folder, LoadOptions("float64", page_size=16, kv_dtype="fp8"))
        run = PagedRun(model, seed=len(cuts))
        lane = run.start()
        for start, end in pairwise((0, *cuts)):
            run.prefill([Part(lane, PROMPT[start:end])])
        for token in PROMPT[lane.position : 64]:
            run.decode([lane], [token])
        slab, slots = run.slabs.tensors[Kind.FULL], lane.pages[Kind.FULL]
        found.append(slab[[slots[page] for page in range(4)]])
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.skipif(not reads_panels(torch.float32), reason="there is no AVX-512")
@pytest.mark.parametrize("variant", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_however_its_prompt_was_cut(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    """Windows and sinks too. A chunk attends to the rounded keys of its own tokens, as later ones
    and decode do."""
    folder = save_tiny_model(tmp_path, variant)
    found = []
    for cuts in ((60,), (16, 48, 60), (7, 33, 59), (31,)):
        model = load_model(folder, LoadOptions(dtype, page_size=16, kv_dtype="fp8"))
        run = PagedRun(model, seed=len(cuts))
        lane, rows = run.start(), []
        for start, end in pairwise((0, *cuts)):
            rows += run.prefill([Part(lane, PROMPT[start:end])])
        rows += [run.decode([lane], [token]) for token in PROMPT[lane.position : 64]]
        found.append(torch.cat(rows))
    assert all(rows.equal(found[0]) for rows in found[1:])


def answers(folder: Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
    options = {"dtype": "float64", "page_size": 16, "kv_dtype": "fp8", **options}
    with LLM(folder, memory_bytes=1 << 24, **options) as llm:
        return [llm.generate([prompt], PARAMS)[0] for prompt in prompts]


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.token_ids == expected.token_ids
    for some, others in zip(found.logprobs, expected.logprobs, strict=True):
        assert some == pytest.approx(others, abs=1e-12)


@pytest.mark.parametrize("chunk_tokens", [16, 48])
def test_every_reuse_is_the_cold_run(folder: Path, chunk_tokens: int) -> None:
    sibling = [*PROMPT[:70], 9, 9]
    cold = answers(folder, [PROMPT], prefix_cache=False, chunk_tokens=1024)
    cold += answers(folder, [sibling], prefix_cache=False, chunk_tokens=1024)
    asked = [PROMPT, PROMPT, sibling, PROMPT]
    found = answers(folder, asked, chunk_tokens=chunk_tokens, draft="ngram")
    for some, others in zip(found, [cold[0], cold[0], cold[1], cold[0]], strict=True):
        assert_same(some, others)
    assert sum(found[1].cached_tokens.values()) == 64


def test_workers_that_keep_other_bytes_refuse_each_other(folder: Path) -> None:
    config = load_config(folder)
    narrow, wide = (
        state_manifest(config, "bfloat16", 16, "same", kv_dtype=kv) for kv in ("fp8", "auto")
    )
    assert narrow.digest != wide.digest
    (full, *_) = narrow.differences(wide)
    assert "dtype float8_e4m3fn here, bfloat16 there" in full
    sizes = [each.layout(Kind.FULL).slot_bytes for each in (narrow, wide)]
    # Heads of 8 numbers are a bad case: a scale for each costs half as much as the codes.
    assert sizes[0] / sizes[1] == pytest.approx((8 + 4) / 16)


def test_a_model_without_keys_refuses_the_option(tmp_path: Path) -> None:
    folder = save_native(tmp_path, native_config(("mamba",)))
    with pytest.raises(ConfigError, match="kv_dtype=fp8: no layer"):
        load_model(folder, LoadOptions("float32", page_size=16, kv_dtype="fp8"))
