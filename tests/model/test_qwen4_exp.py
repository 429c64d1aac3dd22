"""Qwen 4 Exp: published fields, names of tensors, the tables of n-grams and what names a row."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun, Part
from tests.model.ragged import random_prompt
from tests.tiny_models import save_random
from torch import Tensor

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.families.qwen4_exp import Qwen4ExpConfig
from ferryman.model.layers.convolved_attention import ChannelConv
from ferryman.model.layers.ngram_hashes import (
    NgramHashes,
    multipliers_of,
    rows_of_heads,
    scrambled,
)
from ferryman.model.layers.ngrams import LastTokens, delays_of
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.batch import DecodeBatch, PrefillBatch
from ferryman.model.shapes.delta_shapes import DeltaGate, DeltaShape
from ferryman.model.shapes.ngram_shapes import NgramShape
from ferryman.model.shapes.row_shapes import MeanIndexShape
from ferryman.model.weights.named_weights import accumulation_dtype

PUBLISHED = Path(__file__).parent / "published" / "Qwen--Qwen3.8-Flash-Next.json"
PROMPT = random_prompt(random.Random(5), 70, VOCAB_SIZE)
SEED = 1
"""Of a model with both kinds of layers and n-grams in two, whose index chooses a part."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_random(tmp_path / "written", random_config("qwen4_exp", SEED), SEED)


def published() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(PUBLISHED.read_text())["config"]
    return config


def read(folder: Path, raw: dict[str, Any]) -> Qwen4ExpConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    assert isinstance(config, Qwen4ExpConfig)
    return config


def logits(folder: Path, kv_dtype: str = "auto") -> Tensor:
    run = PagedRun(load_model(folder, LoadOptions("float32", page_size=8, kv_dtype=kv_dtype)))
    return run.prefill([Part(run.start(), PROMPT)])[0]


def published_ngrams(folder: Path) -> NgramShape:
    (shape,) = filter(None, read(folder, published()).ngrams)
    return shape


def test_the_published_config_is_read_completely(tmp_path: Path) -> None:
    config = read(tmp_path, published())
    assert config.index == MeanIndexShape(heads=4, head_dim=128, block_len=4, count=512)
    assert [layer for layer, ngrams in enumerate(config.ngrams) if ngrams] == [1]
    deltas = [mixer for mixer in config.mixers if isinstance(mixer, DeltaShape)]
    assert len(deltas) == 36
    assert {delta.gate for delta in deltas} == {DeltaGate.SIGMOID}


def test_layers_by_an_interval_are_those_of_the_published_list(tmp_path: Path) -> None:
    raw = published()
    del raw["text_config"]["layer_types"]
    assert read(tmp_path, raw) == read(tmp_path, published())


def test_the_published_tables_have_the_rows_that_others_count(tmp_path: Path) -> None:
    """Ports of the model name the primes and where each table begins."""
    tables = rows_of_heads(published_ngrams(tmp_path))
    assert [len(table) for table in tables[:2]] == [20_000_003, 20_000_023]
    assert [table.start for table in tables[-2:]] == [280_001_114, 300_001_275]
    assert len(tables[-1]) == 20_000_171
    assert all(before.stop == after.start for before, after in pairwise(tables))


def test_numbers_are_scrambled_as_published() -> None:
    """The test vector of SplitMix64 for the seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    drawn = [scrambled(1234567 + step * gamma) for step in range(3)]
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_products_of_ids_do_not_overflow(tmp_path: Path) -> None:
    shape = published_ngrams(tmp_path)
    for multiplier in multipliers_of(shape):
        assert multiplier % 2 == 1
        assert multiplier * (shape.vocab_size - 1) < 1 << 63


def test_a_row_is_named_by_the_ids_of_its_n_gram(tmp_path: Path) -> None:
    shape = published_ngrams(tmp_path)
    multipliers, tables = multipliers_of(shape), rows_of_heads(shape)
    numbers = (multipliers, [len(t) for t in tables], [t.start for t in tables])
    hashes = NgramHashes(*(torch.tensor(part) for part in numbers))
    ids = torch.randint(0, shape.vocab_size, (3, 20))
    rows = hashes(list(ids))
    for token in range(20):
        first, second, third = (
            (int(i) * m) for i, m in zip(ids[:, token], multipliers, strict=True)
        )
        for head, table in enumerate(tables):
            mixed = first ^ second if head < 8 else first ^ second ^ third
            assert int(rows[token, head]) == table[mixed % len(table)]


def naive_ids(token_ids: list[int], at: int, order: int, separator: int) -> list[int]:
    """The token's id, and those before it as far as a separator; the separator itself behind."""
    ids = [token_ids[at]]
    for ago in range(1, order):
        near = token_ids[max(0, at - ago) : at]
        ids.append(token_ids[at - ago] if ago <= at and separator not in near else separator)
    return ids


def batch_of(ids: list[int], start: int, end: int, *, decodes: bool) -> PrefillBatch | DecodeBatch:
    """Tokens of one request in slot 1, in a chunk, or each in a step of its own."""
    named, positions = torch.tensor(ids[start:end]), torch.arange(start, end)
    rows, slot = torch.zeros(end - start, dtype=torch.int64), torch.tensor([1])
    if decodes:
        return DecodeBatch(named, positions, {}, slot, slot, (1,), rows)
    return PrefillBatch(named, positions, rows, ((start, end),), {}, slot, (), rows[:0])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    order=st.integers(2, 4),
    taps=st.integers(2, 4),
    separator=st.sampled_from([0, 7, 248_044]),
)
def test_the_last_ids_are_known_wherever_a_prompt_is_cut(
    data: st.DataObject, dtype: torch.dtype, order: int, taps: int, separator: int
) -> None:
    """Ids of three bytes too, in a dtype that has eight bits for a number."""
    some = st.sampled_from([separator, separator, 1, 255, 256, 65_535, 65_537, (1 << 24) - 1])
    ids = data.draw(st.lists(some, min_size=1, max_size=24))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=5)) | {0, len(ids)})
    depth, wide = (taps - 1) * order, accumulation_dtype(dtype)
    last_tokens = LastTokens(ChannelConv(delays_of(order, depth, wide), None), separator)
    states = torch.zeros(2, 3 * (order - 1), depth, dtype=dtype)
    for start, end in pairwise(cuts):
        decodes = end - start == 1 and data.draw(st.booleans())
        found = last_tokens(
            torch.tensor(ids[start:end]), states, batch_of(ids, start, end, decodes=decodes)
        )
        for at in range(start, end):
            expected = naive_ids(ids, at, order, separator)
            assert [int(ago[at - start]) for ago in found] == expected


def test_tensors_of_a_folder_that_also_reads_images_are_read_by_their_names(
    folder: Path, tmp_path: Path
) -> None:
    right, raw = logits(folder), json.loads((folder / "config.json").read_text())
    nested = tmp_path / "nested"
    nested.mkdir()
    whole = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": raw,
        "tie_word_embeddings": raw["tie_word_embeddings"],
    }
    (nested / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    longer = {
        name.replace("model.", "model.language_model.", 1): part for name, part in tensors.items()
    }
    save_file(longer, nested / "model.safetensors")
    assert torch.equal(logits(nested), right)


def test_a_table_in_one_tensor_is_that_in_parts(folder: Path) -> None:
    right, path = logits(folder), folder / "model.safetensors"
    tensors = load_file(path)
    parts = {name: tensor for name, tensor in tensors.items() if ".shard_" in name}
    assert len(parts) > len({name.partition(".shard_")[0] for name in parts}) > 1
    whole: dict[str, list[Tensor]] = {}
    for number in range(len(parts)):
        for stem in sorted({name.partition(".shard_")[0] for name in parts}):
            if f"{stem}.shard_{number}.weight" in parts:
                whole.setdefault(f"{stem}.weight", []).append(
                    parts[f"{stem}.shard_{number}.weight"]
                )
    rest = {name: tensor for name, tensor in tensors.items() if name not in parts}
    save_file({**rest, **{name: torch.cat(part) for name, part in whole.items()}}, path)
    assert torch.equal(logits(folder), right)


def test_a_checkpoint_s_own_multipliers_count(folder: Path) -> None:
    right, path = logits(folder), folder / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith("layer_multipliers")]
    without = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(without, path)
    assert torch.equal(logits(folder), right)
    save_file({**tensors, names[0]: tensors[names[0]] + 2}, path)
    assert not torch.allclose(logits(folder), right, atol=1e-3)


def test_parts_that_do_not_divide_the_table_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "split_ngram_parts": 1000}))
    with pytest.raises(ConfigError, match=r"split_ngram_parts 1000 .* does not divide"):
        load_model(folder, LoadOptions("float32", page_size=8))


def test_blocks_are_chosen_over_pages_of_codes(folder: Path) -> None:
    """Keys and values are rounded to e4m3, the index is not: the answers are near."""
    plain, coded = logits(folder), logits(folder, "fp8")
    assert not torch.equal(plain, coded)
    assert float((plain - coded).norm() / plain.norm()) < 0.2


def test_fewer_blocks_give_another_answer(folder: Path) -> None:
    """Otherwise no test of this model could tell attention to blocks from full attention."""
    config = load_config(folder)
    assert isinstance(config, Qwen4ExpConfig)
    assert config.index.count * config.index.block_len < len(PROMPT) / 2
    before, raw = logits(folder), json.loads((folder / "config.json").read_text())
    budget = 200 * config.index.block_len
    (folder / "config.json").write_text(json.dumps({**raw, "indexer_budget": budget}))
    assert not torch.allclose(logits(folder), before, atol=1e-3)
