"""Adapters at the router's doors: names that clients may ask for, and the digest that travels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.harness.router import cluster, collect

from ferryman.errors import ConfigError
from ferryman.model.weights.lora import adapter_names
from ferryman.wire.v1 import inference_pb2


@pytest.fixture
def kites(tmp_path: Path) -> Path:
    """An adapter's files: the router reads no more of them than digests."""
    folder = tmp_path / "kites"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(8, 2)}
    tensors = {f"{layer}.{name}.weight": part for name, part in parts.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def test_an_adapter_is_a_model_to_clients(nats_url: str, folder: Path, kites: Path) -> None:
    (named,) = adapter_names({"kites": kites})
    async with cluster(nats_url, folder, lora=f"kites={kites}") as made:
        models = (await made.http.get("/v1/models")).json()["data"]
        assert [(each["id"], each.get("parent")) for each in models] == [
            ("tiny", None),
            ("kites", "tiny"),
        ]
        assert (await made.http.get("/v1/models/kites")).json()["id"] == "kites"
        for asked, said in (("kites", "kites"), ("tiny", "tiny")):
            answer = await made.complete(model=asked, max_tokens=2)
            assert answer.json()["model"] == said
        with_adapter, alone = (order for order in made.prefills[0].orders)
        assert with_adapter.context.adapter == named.digest
        assert alone.context.adapter == ""
        assert with_adapter.request.token_ids.tolist() == alone.request.token_ids.tolist()


async def test_the_same_text_has_other_keys_with_an_adapter(
    nats_url: str, folder: Path, kites: Path
) -> None:
    async with cluster(nats_url, folder, lora=f"kites={kites}") as made:
        for model in ("kites", "tiny"):
            await made.complete("the ferry carries state " * 8, model=model, max_tokens=2)
        first, second = (order.request.keys for order in made.prefills[0].orders)
        assert len(first) == len(second) > 0
        assert set(first).isdisjoint(second)


async def test_an_unknown_name_is_404_with_the_nearest_one(
    nats_url: str, folder: Path, kites: Path
) -> None:
    async with cluster(nats_url, folder, lora=f"kites={kites}") as made:
        refused = await made.complete(model="kite", max_tokens=2)
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert "did you mean kites?" in error["message"]
        assert error["param"] == "model"
        assert (await made.http.get("/v1/models/kite")).status_code == 404


async def test_grpc_lists_adapters_and_serves_them(
    nats_url: str, folder: Path, kites: Path
) -> None:
    async with cluster(nats_url, folder, lora=f"kites={kites}") as made:
        listed = await made.stub.ListModels(inference_pb2.ListModelsRequest())
        assert [model.model_id for model in listed.models] == ["tiny", "kites"]
        asked = inference_pb2.GenerateRequest(
            model="kites",
            prompt=inference_pb2.Prompt(text="the ferry"),
            sampling={"max_tokens": 2},
        )
        started = (await collect(made.stub.Generate(asked)))[0].started
        assert started.model == "kites"


async def test_an_adapter_has_a_name_of_its_own(nats_url: str, folder: Path, kites: Path) -> None:
    with pytest.raises(ConfigError, match="tiny is the model's name"):
        async with cluster(nats_url, folder, lora=f"tiny={kites}"):
            pass
