"""DeepSeek-V4: the names of its published tensors, its codes, its table, its lists of layers."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.differences import difference
from tests.model.families.shapes import VOCAB_SIZE
from tests.model.paged_run import PagedRun
from tests.model.ragged import ragged_logits, random_prompt
from tests.tiny_models import save_random
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4Config

from ferryman.errors import ConfigError
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.shapes.manifest import pads_prompts, state_manifest

SEED = 2
"""A config with layers of all types and several streams."""
PUBLISHED = Path(__file__).parent / "published" / "deepseek-ai--DeepSeek-V4-Flash.json"
FP8_BLOCK, FP4_BLOCK = (16, 24), 32
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PACKED = re.compile(r"\.experts\.\d+\.w\d\.weight$")
IN_FP8 = re.compile(r"(\.wq_[ab]|\.wkv|\.wo_[ab]|shared_experts\.w\d)\.weight$")
FLOATS = re.compile(r"\.compressor\.")
"""Products that stay in floats in published folders."""


def tiny(**fields: object) -> DeepseekV4Config:
    """A random config with sizes that hold blocks of codes, and tables in some layers."""
    config = random_config("deepseek_v4", SEED)
    assert isinstance(config, DeepseekV4Config)
    raw = {**config.to_dict(), "hidden_size": 64, "moe_intermediate_size": 32, **fields}
    types = ["hash_moe", "moe"] * config.num_hidden_layers
    raw |= {"mlp_layer_types": types[: config.num_hidden_layers], "tie_word_embeddings": False}
    return DeepseekV4Config(**raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers writes it, whose names are neither the published ones nor its modules'."""
    return save_random(tmp_path / "written", tiny(), SEED)


def published_name(name: str) -> str:
    """The name of deepseek-ai/DeepSeek-V4-Flash for a tensor that transformers wrote."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    name = re.sub(r"hc_head\.hc_(\w+)", r"hc_head_\1", name)
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def save_as(folder: Path, to: Path, tensors: Mapping[str, Tensor], **fields: object) -> Path:
    """The model of `folder` with other `tensors` and fields."""
    to.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**raw, **fields}))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, to / "model.safetensors", {"format": "pt"})
    return to


def published_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {published_name(name): tensor for name, tensor in tensors.items()}


def logits(folder: Path) -> list[Tensor]:
    rng = random.Random(5)
    prompts = [random_prompt(rng, length, VOCAB_SIZE) for length in (9, 40)]
    model = load_model(folder, LoadOptions("float64", page_size=8))
    return ragged_logits(PagedRun(model, 5), prompts, rng)


def test_tensors_are_read_by_any_of_their_names(folder: Path, tmp_path: Path) -> None:
    modules = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    drafting = {"mtp.0.norm.weight": torch.ones(64), "mtp.0.hc_head_base": torch.ones(2)}
    forms = (published_tensors(folder) | drafting, modules)
    right = logits(folder)
    for number, tensors in enumerate(forms):
        other = save_as(folder, tmp_path / str(number), tensors)
        names = set(load_file(folder / "model.safetensors"))
        assert len(set(tensors) - names) > 20
        for one, same in zip(logits(other), right, strict=True):
            assert torch.equal(one, same)


def power_of_two(largest: float, most: float) -> float:
    """The least one by which `largest` is divided to at most `most`."""
    power = 2.0**-20
    while largest / power > most:
        power *= 2
    return power


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, powers of two for each block, and the numbers that both stand for."""
    rows, columns = FP8_BLOCK
    counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    codes, powers = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(counts)
    meaning = torch.empty_like(weight, dtype=torch.float64)
    for i in range(counts[0]):
        for j in range(counts[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            powers[i, j] = power_of_two(float(weight[at].abs().max()), 448)
            codes[at] = (weight[at] / powers[i, j]).to(torch.float8_e4m3fn)
            meaning[at] = codes[at].double() * powers[i, j].double()
    return codes, powers.to(torch.float8_e8m0fnu), meaning


def in_fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of pairs of codes in signed bytes, the even column's in the lower bits."""
    powers, packed = torch.empty(len(weight), weight.shape[1] // FP4_BLOCK), list[list[int]]()
    meaning = torch.empty_like(weight, dtype=torch.float64)
    for i, row in enumerate(weight.tolist()):
        codes = list[int]()
        for j in range(powers.shape[1]):
            block = row[j * FP4_BLOCK : (j + 1) * FP4_BLOCK]
            power = power_of_two(max(map(abs, block)), 6)
            powers[i, j] = power
            for number in block:
                size = min(range(8), key=lambda code: abs(FP4[code] - abs(number) / power))
                meaning[i, len(codes)] = (-1 if number < 0 else 1) * FP4[size] * power
                codes.append(size + (8 if number < 0 else 0))
        packed.append([low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)])
    pairs = torch.tensor(packed, dtype=torch.uint8).view(torch.int8)
    return pairs, powers.to(torch.float8_e8m0fnu), meaning


def test_published_codes_are_the_numbers_that_they_stand_for(folder: Path, tmp_path: Path) -> None:
    """FP8 by blocks, and experts in MXFP4 beside it, with scales that are powers of two."""
    tensors, twin = published_tensors(folder), published_tensors(folder)
    kinds = {in_fp4: 0, in_fp8: 0}
    for name, weight in list(tensors.items()):
        is_coded = PACKED.search(name) or IN_FP8.search(name)
        if not is_coded or FLOATS.search(name):
            continue
        quantise = in_fp4 if PACKED.search(name) else in_fp8
        kinds[quantise] += 1
        tensors[name], scales, twin[name] = quantise(weight)
        tensors[name.replace(".weight", ".scale")] = scales
    assert min(kinds.values()) > 4
    format_fields = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    stored = {**format_fields, "weight_block_size": list(FP8_BLOCK)}
    coded = save_as(
        folder, tmp_path / "coded", tensors, quantization_config=stored, expert_dtype="fp4"
    )
    right = logits(save_as(folder, tmp_path / "twin", twin))
    for one, same in zip(logits(coded), right, strict=True):
        assert difference(one, same) < 1e-12
    assert max(difference(*pair) for pair in zip(logits(folder), right, strict=True)) > 1e-3


def test_packed_experts_whose_columns_fill_no_block_are_refused(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "written", tiny(moe_intermediate_size=24), SEED)
    tensors = published_tensors(folder)
    name = "layers.0.ffn.experts.0.w2.weight"
    tensors[name] = torch.zeros(64, 12, dtype=torch.int8)
    stored = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    other = save_as(folder, tmp_path / "packed", tensors, quantization_config=stored)
    with pytest.raises(ConfigError, match=r"down_proj.weight is packed.*24 columns"):
        load_model(other, LoadOptions("float32", page_size=8))


@pytest.mark.parametrize("expert", [-1, 99])
def test_a_table_that_names_an_expert_beyond_all_is_refused(
    expert: int, folder: Path, tmp_path: Path
) -> None:
    tensors = published_tensors(folder)
    tensors["layers.0.ffn.gate.tid2eid"][7, 0] = expert
    other = save_as(folder, tmp_path / "other", tensors)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.gate\.tid2eid names experts beyond"):
        load_model(other, LoadOptions("float32", page_size=8))


def test_a_table_of_32_bits_is_that_of_64(folder: Path, tmp_path: Path) -> None:
    tensors = published_tensors(folder)
    name = "layers.0.ffn.gate.tid2eid"
    tensors[name] = tensors[name].to(torch.int32)
    other = logits(save_as(folder, tmp_path / "other", tensors))
    for one, same in zip(other, logits(folder), strict=True):
        assert torch.equal(one, same)


def written(folder: Path, raw: Mapping[str, object]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_a_published_config_says_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Of its ratios, numbers of tables and rotations."""
    raw = json.loads(PUBLISHED.read_text())["config"]
    published = load_config(written(tmp_path / "published", raw))
    DeepseekV4Config(**raw).save_pretrained(tmp_path / "other")
    saved = json.loads((tmp_path / "other" / "config.json").read_text())
    assert "compress_ratios" not in saved
    other = written(tmp_path / "other", {**saved, "architectures": raw["architectures"]})
    assert load_config(other) == published


def test_lists_that_are_left_out_have_their_meaning(tmp_path: Path) -> None:
    raw = json.loads(PUBLISHED.read_text())["config"]
    for name in ("compress_ratios", "num_hash_layers"):
        del raw[name]
    short = load_config(written(tmp_path / "short", raw))
    DeepseekV4Config(**raw).save_pretrained(tmp_path / "other")
    saved = json.loads((tmp_path / "other" / "config.json").read_text())
    whole = written(tmp_path / "other", {**saved, "architectures": raw["architectures"]})
    assert load_config(whole) == short


def published_with(folder: Path, **fields: object) -> Path:
    raw = json.loads(PUBLISHED.read_text())["config"]
    return written(folder, {**raw, **fields})


REFUSED = [
    ({"compress_ratios": [False] * 99}, "'compress_ratios' must be a list of 43 of 0, 4 and 128"),
    ({"compress_ratios": [[4]] * 99}, "'compress_ratios' must be a list of 43 of 0, 4 and 128"),
    ({"compress_ratios": 4}, "'compress_ratios' must be a list of 43 of 0, 4 and 128"),
    ({"rope_scaling": [1]}, r"'rope_scaling' must be an object; it is \[1\]"),
    ({"rope_parameters": [1]}, r"'rope_parameters' must be an object; it is \[1\]"),
]


@pytest.mark.parametrize(("fields", "expected"), REFUSED, ids=str)
def test_a_refusal_names_the_field_that_was_read(
    fields: dict[str, object], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(published_with(tmp_path / "published", **fields))


@pytest.mark.parametrize(("block_len", "most"), [(12, 4), (9, 1)])
def test_a_page_that_cuts_a_block_is_refused_with_one_that_does_not(
    block_len: int, most: int, tmp_path: Path
) -> None:
    config = load_config(published_with(tmp_path / "published", compress_rate_csa=block_len))
    advice = f"a power of two that divides {block_len}, {most} at most"
    with pytest.raises(ConfigError, match=advice):
        state_manifest(config, "bfloat16", 16, "")
    assert state_manifest(config, "bfloat16", most, "").page_size == most


def test_prompts_are_padded_where_no_token_lists_blocks(tmp_path: Path) -> None:
    """The list of a padded token is as long as the longest prompt's."""
    folder = tmp_path / "published"
    for ratios, is_padded in (([0], True), ([0, 4], False), ([0, 128], False)):
        fields = {"compress_ratios": ratios, "num_hidden_layers": len(ratios)}
        assert pads_prompts(load_config(published_with(folder, **fields))) == is_padded
