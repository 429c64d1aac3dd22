"""Tiny checkpoints with a layer for multi-token prediction, and the layer's formula in float64.

transformers has the layer's parts and no code that joins them. `MtpFormula` joins them as published
code does (vLLM's qwen3_next_mtp, qwen3_5_mtp, deepseek_mtp and nemotron_h_mtp):

    x = fuse(norm(embedding of token t + 1), norm(hidden of t)),  y = norm(layer(x)),  head(y)

with the entry of position 0 as `ferryman.model.layers.mtp` describes it.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.model.comparison import random_config
from tests.model.families.ling25 import Ling25Layer, Ling25Norm
from tests.oracle import TransformersOracle, load_oracle
from tests.tiny_models import drawn, save_random
from torch import Tensor, nn
from transformers import PretrainedConfig

from ferryman.errors import ConfigError
from ferryman.model.config import mtp_config
from ferryman.model.shapes.manifest import state_manifest

WEIGHTS = "model.safetensors"


class Qwen(nn.Module):
    """The tensors of Qwen3-Next and Qwen3.5 under "mtp"."""

    def __init__(self, config: PretrainedConfig, layer: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(dim, eps), norm(dim, eps)
        self.norm = norm(dim, eps)
        self.fc = nn.Linear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList([layer])

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.fc, self.norm


class Deepseek(nn.Module):
    """The tensors of DeepSeek-V3 beside those of the layer itself."""

    def __init__(self, config: PretrainedConfig, layer: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = norm(dim, eps), norm(dim, eps)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(dim, eps)
        self.layers = nn.ModuleList([layer])

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.enorm, self.hnorm, self.eh_proj, self.shared_head.norm


class Nemotron(nn.Module):
    """The tensors of Nemotron-H under "mtp": the input's in the first layer, the norm in the
    last."""

    def __init__(
        self, config: PretrainedConfig, layers: Sequence[nn.Module], norm: type[nn.Module]
    ) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(layers)
        first, last = self.layers
        first.enorm, first.hnorm = norm(dim, eps), norm(dim, eps)
        first.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        last.final_layernorm = norm(dim, eps)

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        first, last = self.layers
        return first.enorm, first.hnorm, first.eh_proj, last.final_layernorm


class Ling(nn.Module):
    """The tensors of Ling 2.5 beside those of the layer itself."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = Ling25Norm(dim, eps), Ling25Norm(dim, eps)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.final_layernorm = Ling25Norm(dim, eps)
        self.layers = nn.ModuleList([Ling25Layer(config, config.num_hidden_layers)])

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.enorm, self.hnorm, self.eh_proj, self.final_layernorm


Head = Qwen | Deepseek | Nemotron | Ling


@dataclass(frozen=True, slots=True)
class MtpFamilyCase:
    """One family's layer: its fields in config.json, its module, its tensor names."""

    fields: Mapping[str, Any]
    make: Callable[[PretrainedConfig], Head]
    rename: Callable[[str, PretrainedConfig], str]


def _qwen3_next(config: PretrainedConfig) -> Head:
    code = _code("qwen3_next")
    layer = _attending(code.Qwen3NextDecoderLayer, config)
    return Qwen(config, layer, code.Qwen3NextRMSNorm)


def _qwen3_5(config: PretrainedConfig) -> Head:
    has_experts = config.model_type == "qwen3_5_moe_text"
    code, name = (
        (_code("qwen3_5_moe"), "Qwen3_5Moe") if has_experts else (_code("qwen3_5"), "Qwen3_5")
    )
    layer = _attending(getattr(code, f"{name}DecoderLayer"), config)
    return Qwen(config, layer, getattr(code, f"{name}RMSNorm"))


def _deepseek(config: PretrainedConfig) -> Head:
    code = _code("deepseek_v3")
    layer = code.DeepseekV3DecoderLayer(config, config.num_hidden_layers)
    return Deepseek(config, layer, code.DeepseekV3RMSNorm)


def _nemotron(config: PretrainedConfig) -> Head:
    code, words = _code("nemotron_h"), config.layers_block_type
    places = [words.index(word) for word in ("full_attention", "moe")]
    layers = [code.NemotronHBlock(config, place) for place in places]
    return Nemotron(config, layers, code.NemotronHRMSNorm)


def _code(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _attending(layer: Any, config: PretrainedConfig) -> nn.Module:
    """A layer of attention with the feed-forward of layer 0, which is the number that published
    code gives it."""
    words = config.layer_types
    try:
        config.layer_types = ["full_attention", *words[1:]]
        made: nn.Module = layer(config, 0)
    finally:
        config.layer_types = words
    return made


def _numbered(name: str, config: PretrainedConfig) -> str:
    """The name of a layer's tensor behind the model's layers."""
    return f"model.layers.{config.num_hidden_layers}.{name.removeprefix('layers.0.')}"


CASES: Mapping[str, MtpFamilyCase] = {
    "qwen3_next": MtpFamilyCase({}, _qwen3_next, lambda name, _: f"mtp.{name}"),
    "qwen3_5": MtpFamilyCase(
        {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        _qwen3_5,
        lambda name, _: f"mtp.{name}",
    ),
    "deepseek_v3": MtpFamilyCase(
        {"num_nextn_predict_layers": 1},
        _deepseek,
        _numbered,
    ),
    "ling_25": MtpFamilyCase({"num_nextn_predict_layers": 1}, Ling, _numbered),
    "nemotron_h": MtpFamilyCase(
        {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        _nemotron,
        lambda name, _: f"mtp.{name}",
    ),
}


def save_with_mtp(
    folder: Path,
    family: str,
    *,
    num_ranks: int = 1,
    is_wanted: Callable[[PretrainedConfig], bool] = lambda _: True,
) -> Path:
    """Writes a random model of `family` with a drafting layer, which `num_ranks` can share; the
    first whose config `is_wanted`."""
    for seed in itertools.count():
        config = random_config(family, seed)
        if not is_wanted(config):
            continue
        words = getattr(config, "layer_types", None) or ["full_attention"]
        if "full_attention" not in words or "moe" not in getattr(
            config, "layers_block_type", ["moe"]
        ):
            continue
        save_random(folder, config, seed)
        _add_layer(folder, config, CASES[family], seed)
        try:
            state_manifest(mtp_config(folder), "float64", 8, "", num_ranks)
        except ConfigError:
            continue
        return folder
    raise AssertionError("unreachable")


def _add_layer(folder: Path, config: PretrainedConfig, case: MtpFamilyCase, seed: int) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        head = case.make(config)
        added = {
            case.rename(name, config): drawn(name, tensor).contiguous()
            for name, tensor in head.state_dict().items()
        }
    stored = load_file(folder / WEIGHTS)
    assert not stored.keys() & added.keys()
    save_file({**stored, **added}, folder / WEIGHTS, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(case.fields)))


class MtpFormula:
    """The drafts of the model in `folder`, in float64, from all tokens at once."""

    def __init__(self, folder: Path, family: str) -> None:
        self._oracle: TransformersOracle = load_oracle(folder, torch.float64)
        model, case = self._oracle.model, CASES[family]
        config = model.config.get_text_config()
        config._attn_implementation = config._experts_implementation = "eager"
        with self._oracle.mode:
            head = case.make(config).to(torch.float64).eval()
        stored = load_file(folder / WEIGHTS)
        names = {name: case.rename(name, config) for name in head.state_dict()}
        head.load_state_dict({name: stored[read].double() for name, read in names.items()})
        self._head = head
        self._known: dict[tuple[int, ...], Tensor] = {}

    def drafts(self, whole: Sequence[int], length: int, num_drafts: int) -> list[int]:
        """The tokens that the layer proposes after the first `length` of `whole`."""
        embedding_norm, hidden_norm, fuse, norm = self._head.parts
        proposed: list[int] = []
        with torch.inference_mode(), self._oracle.mode:
            hidden = self._hidden(tuple(whole))[:length]
            embed = self._oracle.model.get_input_embeddings()
            for _ in range(num_drafts):
                known = torch.tensor([*whole[:length], *proposed])
                x = fuse(torch.cat([embedding_norm(embed(known)), hidden_norm(hidden)], -1))
                x[0] = 0
                y = norm(self._layers(x))[-1:]
                proposed.append(int(self._oracle.model.get_output_embeddings()(y).argmax()))
                hidden = torch.cat([hidden, y])
        return proposed

    def _hidden(self, whole: tuple[int, ...]) -> Tensor:
        """The hidden state before each position, zeros before the first."""
        if whole not in self._known:
            base = self._oracle.model.base_model
            found = base(torch.tensor([whole]), use_cache=False).last_hidden_state[0]
            self._known[whole] = torch.cat([torch.zeros_like(found[:1]), found])
        return self._known[whole]

    def _layers(self, x: Tensor) -> Tensor:
        ahead = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, len(x), len(x), dtype=x.dtype).masked_fill(ahead, -torch.inf)
        positions = torch.arange(len(x))[None]
        rotary = getattr(self._oracle.model.base_model, "rotary_emb", None)
        options = {"position_embeddings": rotary(x[None], positions)} if rotary else {}
        hidden = x[None]
        for layer in self._head.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, **options)
        found: Tensor = hidden[0]
        return found
