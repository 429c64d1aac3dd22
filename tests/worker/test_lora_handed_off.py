"""Requests with LoRA adapters, handed off: the answers of the merged models, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.engine.host_fed import Cell, engine
from tests.harness.pair import WorkerPair, check, pair_with, worker_options
from tests.lora_folders import save_adapter
from tests.tiny_models import save_tiny_model
from tests.waiting import until
from tests.worker.test_hand_off_of_families import GREEDY, PROMPT

from ferryman.cache.keys import as_token_ids, page_keys, root_key
from ferryman.errors import InvalidRequest, ManifestMismatch
from ferryman.llm import Completion
from ferryman.schedule.request import Request
from ferryman.wire.values import PrefillOrder


@dataclass(frozen=True)
class AdaptedFolders:
    """A hybrid model, its adapters' folders, and the answers of the merged models by name."""

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Completion]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> AdaptedFolders:
    path = tmp_path_factory.mktemp("adapted")
    base = save_tiny_model(path / "base", "granite_nope")
    folders, adapters = {"": base}, {}
    for seed, name in enumerate(("one", "two")):
        adapter = save_adapter(base, path / name, seed=seed)
        adapters[name], folders[name] = adapter.folder, adapter.merged(path / f"merged-{name}")
    merged = {}
    for name, folder in folders.items():
        with engine(folder, Cell(1024, overlap=False, prefix_cache=False)) as llm:
            merged[name] = llm.generate([PROMPT], GREEDY)[0]
    assert len({found.token_ids for found in merged.values()}) == 3, "the adapters tell"
    return AdaptedFolders(base, adapters, merged)


@asynccontextmanager
async def pair_on(
    adapted: AdaptedFolders, at_prefill: tuple[str, ...], at_decode: tuple[str, ...]
) -> AsyncIterator[WorkerPair]:
    def lora(names: tuple[str, ...]) -> str:
        return ",".join(f"{name}={adapted.adapters[name]}" for name in names)

    prefills = worker_options(adapted.base, 32, 1, decodes=False, lora=lora(at_prefill))
    decodes = worker_options(adapted.base, 64, 1, lora=lora(at_decode))
    async with pair_with(prefills, decodes) as pair:
        yield pair
        await until(lambda: not pair.leased())


def order(pair: WorkerPair, request_id: str, name: str, keys_of: str | None = None) -> PrefillOrder:
    """An order for the adapter `name`; with the page keys of another one, if that is given."""
    adapters = pair.prefill.engine.adapters
    digests = {"": "", **{known: adapter.digest for known, adapter in adapters.items()}}
    manifest, ids = pair.decode.engine.manifest, as_token_ids(PROMPT)
    root = root_key(manifest, adapter=digests[name if keys_of is None else keys_of])
    asked = Request(request_id, ids, page_keys(root, ids, manifest.page_size), GREEDY)
    made = pair.order(asked)
    return replace(made, context=replace(made.context, adapter=digests[name]))


async def test_adapters_mixed_on_both_workers_answer_as_the_merged_models(
    adapted: AdaptedFolders,
) -> None:
    """Decode numbers them otherwise, for it has one more: the digest tells them."""
    async with pair_on(adapted, ("two",), ("one", "two")) as pair:
        async with asyncio.TaskGroup() as at_once:
            for name in ("", "two"):
                at_once.create_task(pair.run_prefill(order(pair, f"first-{name}", name)))
        for name in ("", "two"):
            await check(pair, f"first-{name}", adapted.merged[name])
            await pair.run_prefill(order(pair, f"again-{name}", name))
            await check(pair, f"again-{name}", adapted.merged[name])
        positions = [facts["position"] for facts in pair.prefill.facts("admitted")]
        assert positions == [0, 0, 64, 64], "each reuses its own state"


async def test_an_adapter_that_decode_lacks_is_refused_with_what_it_has(
    adapted: AdaptedFolders,
) -> None:
    async with pair_on(adapted, ("one",), ("two",)) as pair:
        digest = pair.prefill.engine.adapters["one"].digest
        with pytest.raises(ManifestMismatch, match=f"adapter: .* here, {digest} there"):
            await pair.run_prefill(order(pair, "r1", "one"))
        await pair.run_prefill(order(pair, "r2", ""))
        await check(pair, "r2", adapted.merged[""])


async def test_keys_of_another_adapter_are_refused(adapted: AdaptedFolders) -> None:
    async with pair_on(adapted, ("one",), ("one",)) as pair:
        for name, keys_of in (("one", ""), ("", "one")):
            with pytest.raises(InvalidRequest, match="page key"):
                await pair.run_prefill(order(pair, f"r-{name}", name, keys_of))
