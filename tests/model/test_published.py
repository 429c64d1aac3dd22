"""Configs of published models are read, and every field of them counts or is known not to.

A field that counts is refused, or changes what is read, when it holds nonsense. A published config
that holds a field that neither counts nor is known was not read completely.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.model_tables import PublishedConfig, published_configs

from ferryman.errors import ConfigError
from ferryman.model.config import family_of, load_config, load_format
from ferryman.model.families import FAMILIES
from ferryman.model.nearest_family import NEVER_COUNTS
from ferryman.model.shapes.model_shapes import ModelConfig
from ferryman.model.weights.named_weights import WeightFormat
from ferryman.model.weights.quantisation.awq import Awq
from ferryman.model.weights.quantisation.fp8 import Fp8, ScaleBlock
from ferryman.model.weights.quantisation.gptq import Gptq
from ferryman.model.weights.quantisation.mxfp4 import Mxfp4

NESTED = (
    "text_config",
    "rope_scaling",
    "rope_parameters",
    "full_attention",
    "sliding_attention",
    "hybrid",
    "hybrid_sliding",
)
NONSENSE = ["nonsense"]

OF_OTHER_PARTS = frozenset(
    """
    audio_token_id boa_token_id boi_token_id boi_token_index eoa_token_id eoa_token_index
    eoi_token_id eoi_token_index image_token_id image_token_index
    mlp_speculator mm_tokens_per_image mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_nextn_predict_layers video_token_id vision_end_token_id
    vision_soft_tokens_per_image vision_start_token_id
    """.split()
)
"""Fields of towers for images and sound, and of layers that predict several tokens."""


@pytest.mark.parametrize("published", published_configs(), ids=lambda each: each.model)
def test_a_published_config_is_read_completely(published: PublishedConfig, tmp_path: Path) -> None:
    read = load_config(published.write(tmp_path))
    text = {**published.config, **published.config.get("text_config", {})}
    assert len(read.states) == read.trunk.num_layers
    kinds = {shape.kind for layer in read.states for shape in layer}
    assert kinds <= set(family_of(tmp_path).kinds)
    assert (read.trunk.vocab_size, read.trunk.hidden_dim) == (
        text.get("unpadded_vocab_size", text["vocab_size"]),
        text.get("hidden_size", text.get("n_embd")),
    )
    ignored = {
        name
        for name, changed in with_nonsense(published.config)
        if not counts(changed, published, read, tmp_path)
    }
    not_known = ignored - NEVER_COUNTS - OF_OTHER_PARTS - set(published.unused)
    assert not not_known, "the family reads past these fields"
    assert set(published.unused) <= ignored, "these fields are used"


def with_nonsense(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field's name, and the fields with nonsense in its place; of objects, each field."""
    for name, value in fields.items():
        if name in NESTED and isinstance(value, dict):
            for inner, changed in with_nonsense(value):
                yield inner, {**fields, name: changed}
        elif name != "quantization_config":
            yield name, {**fields, name: NONSENSE}


def counts(
    changed: dict[str, Any], published: PublishedConfig, read: ModelConfig, folder: Path
) -> bool:
    try:
        return load_config(replace(published, config=changed).write(folder)) != read
    except ConfigError:
        return True


LEAST_READ, LEAST_TRIED = 76, 82
REFUSED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "refused").glob("*.json"))
}
"""Published configs that are not read, each with words of the reason."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_that_is_not_read_is_refused_by_its_name(
    name: str, tmp_path: Path
) -> None:
    config = REFUSED[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refusal:
        load_config(tmp_path)
    assert f"architecture {config['architectures'][0]} is not supported" in str(refusal.value)
    assert REFUSED[name]["reason"] in str(refusal.value)


def test_every_family_has_a_published_config(tmp_path: Path) -> None:
    """All but the native one, which nobody publishes; and most that are published are read."""
    configs = published_configs()
    families = {family_of(published.write(tmp_path)).name for published in configs}
    assert families == {family.name for family in FAMILIES} - {"native"}
    assert len(configs) >= LEAST_READ
    assert len(configs) + len(REFUSED) >= LEAST_TRIED


QUANTISED = [each for each in published_configs() if "quantization_config" in each.config]

FORMATS: Mapping[str, WeightFormat] = {
    "awq": Awq(group_len=128),
    "fp8": Fp8(ScaleBlock(128, 128)),
    "gptq": Gptq(bits=4, group_len=128, zero_offset=1),
    "mxfp4": Mxfp4(),
}
"""The formats of the published configs, by their `quant_method`."""

SAID_BY_TENSORS = frozenset("desc_act modules_to_not_convert scale_fmt sym zero_point".split())
OF_TOOLS = frozenset(
    """
    activation_scheme damp_percent model_file_base_name model_name_or_path static_groups
    true_sequential
    """.split()
)
"""Fields about activations, and about a tool's way to the codes."""


@pytest.mark.parametrize("published", QUANTISED, ids=lambda each: each.model)
def test_a_published_format_is_read_completely(published: PublishedConfig, tmp_path: Path) -> None:
    fields = published.config["quantization_config"]
    read = FORMATS[fields["quant_method"]]
    assert load_format(published.write(tmp_path)) == read
    changed = {name: {**fields, name: NONSENSE} for name in fields}
    ignored = {
        name for name, each in changed.items() if format_with(each, published, tmp_path) == read
    }
    assert ignored <= SAID_BY_TENSORS | OF_TOOLS


def format_with(
    fields: dict[str, Any], published: PublishedConfig, folder: Path
) -> WeightFormat | None:
    """The format by these fields of the quantisation, or None if they are refused."""
    changed = replace(published, config={**published.config, "quantization_config": fields})
    try:
        return load_format(changed.write(folder))
    except ConfigError:
        return None


def test_a_field_that_a_family_reads_past_is_found(tmp_path: Path) -> None:
    """The test of the test: a field that nothing reads does not count."""
    published = next(each for each in published_configs() if each.model == "Qwen/Qwen3-8B")
    read = load_config(published.write(tmp_path))
    assert not counts({**published.config, "attention_temperature": 2}, published, read, tmp_path)
    assert counts({**published.config, "rms_norm_eps": NONSENSE}, published, read, tmp_path)
