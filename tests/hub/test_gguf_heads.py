"""A GGUF file on the hub is described by its head: ranges of it, and never its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.gguf_models.files import file_bytes, floats, write
from tests.hub.stand_in import HubStandIn, Repository, hub_stand_in, point_client_at
from tools.bench.gguf.container import Setting

from ferryman.errors import ConfigError
from ferryman.gguf.model_file import is_head, model_name
from ferryman.hub import gguf_files
from ferryman.hub.client import HubModel
from ferryman.hub.models import described_by_head, is_complete, model_folder
from ferryman.model.config import load_config
from ferryman.model.load_options import LoadOptions
from ferryman.model.registry import load_model
from ferryman.model.weights.gguf_checkpoint import open_gguf
from ferryman.settings.sources import GivenValue, Origin, Source, Sources
from ferryman_cli.fit import run_fit
from ferryman_launcher.checks.model_places import locate
from ferryman_launcher.options import up_options

NAME, FILE = "acme/wide-GGUF", "wide-F32.gguf"
SHARDS = tuple(f"wide-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2))
MODEL = HubModel(NAME, "", FILE)
METADATA: dict[str, Setting] = {
    "general.architecture": "llama",
    "llama.context_length": 1024,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": [f"token {number}" for number in range(2000)],
}
SHAPES = {
    "token_embd.weight": (2000, 64),
    "output_norm.weight": (64,),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_gate.weight": (96, 64),
    "blk.0.ffn_up.weight": (96, 64),
    "blk.0.ffn_down.weight": (64, 96),
    # Behind the weights, where no range of the head reaches.
    "rope_freqs.weight": (8,),
}
TENSORS = [
    floats(name, np.linspace(1, 2, int(np.prod(shape))).reshape(shape))
    for name, shape in SHAPES.items()
]
CONTENT = file_bytes(METADATA, TENSORS)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub with the model in a file, and in two shards. Heads begin with a short range."""
    of_shards = {**METADATA, "split.count": 2}
    files = {FILE: CONTENT}
    for shard, tensors in zip(SHARDS, (TENSORS[:6], TENSORS[6:]), strict=True):
        files[shard] = write(tmp_path / shard, of_shards, tensors).read_bytes()
    monkeypatch.setattr(gguf_files, "FIRST_BYTES", 512)
    with hub_stand_in() as stand_in:
        point_client_at(stand_in, tmp_path / "cache", monkeypatch)
        monkeypatch.chdir(tmp_path)
        stand_in.repositories[NAME] = Repository(files)
        yield stand_in


def sent_bytes(hub: HubStandIn, name: str) -> int:
    """The bytes of a file that were asked for by ranges; no answer was the whole."""
    total = 0
    for span in hub.got(name):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", span)
        assert match is not None, span
        total += int(match[2]) + 1 - int(match[1])
    return total


def test_a_head_says_what_the_whole_file_says(hub: HubStandIn) -> None:
    head = described_by_head(MODEL)
    assert (model_name(head), is_head(head), is_complete(head)) == ("wide-F32", True, False)
    assert 32_000 < sent_bytes(hub, FILE) < len(CONTENT) / 4
    whole = model_folder(f"{NAME}:{FILE}")
    assert whole.read_bytes() == CONTENT
    assert load_config(head) == load_config(whole)
    ours, theirs = (open_gguf(file).tensors for file in (head, whole))
    assert [(t.name, t.shape, t.start, t.end) for t in ours.values()] == [
        (t.name, t.shape, t.start, t.end) for t in theirs.values()
    ]
    assert head.stat().st_size == len(CONTENT)
    with pytest.raises(ConfigError, match="has no weights: it was fetched to be described"):
        load_model(head, LoadOptions("float32", page_size=16))


def test_a_head_is_fetched_once_and_a_whole_file_is_its_own(hub: HubStandIn) -> None:
    head = described_by_head(MODEL)
    num_ranges = len(hub.got(FILE))
    assert described_by_head(MODEL) == head
    assert len(hub.got(FILE)) == num_ranges
    whole = model_folder(f"{NAME}:{FILE}")
    assert described_by_head(MODEL) == whole


def test_fit_counts_the_same_without_the_weights(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan() -> tuple[int, list[int]]:
        given = {("", "model"): GivenValue(f"{NAME}:{FILE}", Origin.FLAG, "")}
        sources, places = locate(Sources((Source(given),)), described_by_head)
        assert run_fit(up_options(sources), places, as_json=True) == 0
        planned = json.loads(capsys.readouterr().out)
        return planned["stored_bytes"], [w["weight_bytes"] for w in planned["workers"]]

    by_head = plan()
    assert "" not in hub.got(FILE)
    model_folder(f"{NAME}:{FILE}")
    assert by_head == plan()


def test_the_heads_of_all_shards_are_fetched(hub: HubStandIn) -> None:
    head = described_by_head(HubModel(NAME, "", "Q8_0"))
    assert len(open_gguf(head).tensors) == len(SHAPES) - 1
    assert [path.name for path in sorted(head.parent.iterdir())] == [f"{n}-head" for n in SHARDS]


def test_a_head_beyond_the_limit_is_refused(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "HEAD_BYTES", 4096)
    with pytest.raises(ConfigError, match=r"the head of wide-F32\.gguf has more than"):
        described_by_head(MODEL)
    assert sent_bytes(hub, FILE) == 4096
    assert not kept_heads()


def test_a_hub_without_ranges_is_refused_before_it_sends_the_file(hub: HubStandIn) -> None:
    hub.sends_ranges = False
    with pytest.raises(ConfigError, match=r"sends no parts of wide-F32\.gguf; download it"):
        described_by_head(MODEL)
    assert not kept_heads()


def test_a_broken_connection_leaves_no_head(hub: HubStandIn) -> None:
    hub.breaks[FILE] = 100
    with pytest.raises(ConfigError) as refused:
        described_by_head(MODEL)
    assert "\n" not in str(refused.value)
    assert not kept_heads()
    assert is_head(described_by_head(MODEL))


def test_a_file_of_another_format_is_refused(hub: HubStandIn) -> None:
    hub.repositories[NAME] = Repository({FILE: b"PK" + CONTENT[2:]})
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        described_by_head(MODEL)
    cut = Repository({FILE: CONTENT[: len(CONTENT) // 2]})
    hub.repositories[NAME] = cut
    with pytest.raises(ConfigError, match="complete the download"):
        described_by_head(MODEL)


def kept_heads() -> list[Path]:
    """All files beside the client's snapshots."""
    folder = Path("cache") / gguf_files.HEAD_FOLDER
    return [path for path in folder.rglob("*") if path.is_file()]
