"""The table of bits counts what it says: one bit is a difference, no effect is no success."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.host_fed import HostFed
from tools.bits.__main__ import main
from tools.bits.compared_answer import have_equal_bits, have_equal_tokens
from tools.bits.measured_engine import MeasuredAnswer, MeasuredCase, MeasuredEngine
from tools.bits.models import saved_model
from tools.bits.served_forms import ADAPTER, FORMS
from tools.bits.step_record import StepRecord, recorded_steps
from tools.bits.table import BitsCell, as_text, measured_cells
from tools.bits.ways import WAYS, ReuseWay, again, chunked
from torch import Tensor

from ferryman.model.families import FAMILIES
from ferryman.model.layers.decoder import EmbeddingAndHead
from ferryman.schedule.request import Request
from tools.bits import models

ANSWER = MeasuredAnswer(
    (1, 2),
    (3, 4),
    (b"a", b"b"),
    {},
    1,
    mixed=(False, False),
    chunk_ends=(2,),
    replays=0,
    refusal="",
    threads=frozenset({1}),
)


@pytest.fixture(scope="module", autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cells(*ways: ReuseWay, num_tokens: int = 6) -> list[BitsCell]:
    """The cells of a tiny model with two prompts."""
    with recorded_steps() as record:
        return list(
            measured_cells(
                ["llama"], ["float32"], ways, record, num_prompts=2, num_tokens=num_tokens
            )
        )


def test_a_bit_of_one_row_of_logits_is_a_difference() -> None:
    other = replace(ANSWER, digests=(b"a", b"c"))
    assert have_equal_tokens(other, ANSWER)
    assert not have_equal_bits(other, ANSWER)
    assert have_equal_bits(replace(ANSWER, cached={"device": 16}), ANSWER)


def test_other_tokens_are_no_equal_bits() -> None:
    other = replace(ANSWER, token_ids=(3, 5))
    assert not have_equal_tokens(other, ANSWER)
    assert not have_equal_bits(other, ANSWER)


def test_a_flipped_bit_of_a_logit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest bit of the unlikeliest token's logit, in one way alone."""
    logits = EmbeddingAndHead.logits

    def flipped(ends: EmbeddingAndHead, hidden: Tensor) -> Tensor:
        rows = logits(ends, hidden).clone()
        least = rows[0].argmin()
        rows.view(torch.int32)[0, least] ^= 1
        return rows

    def run(case: MeasuredCase) -> Iterator[Any]:
        with monkeypatch.context() as patched:
            patched.setattr(EmbeddingAndHead, "logits", flipped)
            yield from list(again(case))

    same, planted = cells(WAYS["again"], ReuseWay("planted", "a bit", run))
    assert (same.tried, same.equal, same.bits) == (2, 2, 2)
    assert (planted.tried, planted.equal, planted.bits) == (2, 2, 0)
    assert same.is_exact
    assert not planted.is_exact


def test_a_way_without_effect_is_not_counted_as_equal() -> None:
    (cell,) = cells(ReuseWay("chunks", "a chunk longer than any prompt", partial(chunked, 512)))
    assert (cell.tried, cell.equal, cell.bits) == (0, 0, 0)
    assert cell.not_tried == {"chunks ended at 75": 1, "chunks ended at 98": 1}
    assert not cell.is_exact


def test_a_way_that_the_model_cannot_take_is_no_breach() -> None:
    (cell,) = cells(WAYS["drafts-layer"])
    assert cell.not_tried == {"the model has no such layer": 2}
    assert cell.is_exact
    assert cell.text == "–"


@pytest.mark.slow
def test_every_way_proves_that_it_was_taken() -> None:
    """With recurrences and pages. Only off the scan's grid no chunk ends."""
    with recorded_steps() as record:
        taken = {
            cell.way: cell
            for cell in measured_cells(
                ["bamba"],
                ["bfloat16"],
                list(WAYS.values()),
                record,
                num_prompts=1,
                num_tokens=24,
            )
        }
    untaken = {way for way, cell in taken.items() if not cell.tried}
    assert untaken - {"drafts-lookup"} == {"drafts-layer"}
    assert taken["again"].bits == 1


def test_the_table_has_a_row_for_each_way_and_its_reasons() -> None:
    cell = BitsCell("hit-last", "llama", "int8", tried=3, equal=2, bits=1)
    cell.not_tried["16 tokens came from the device, not 64"] += 1
    text = as_text([cell, BitsCell("again", "llama", "int8", tried=4, equal=4, bits=4)])
    assert "hit-last     2 1 /3" in text
    assert "again        4 4 /4" in text
    assert "hit-last: 1, 16 tokens came from the device, not 64 (llama int8)" in text


def test_the_command_fails_if_a_cell_is_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--models", "llama", "--dtypes", "float32", "--prompts", "1", "--tokens", "4"]
    assert main([*asked, "--ways", "again", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["way"], cell["bits"], cell["is_exact"]) == ("again", 1, True)
    assert main([*asked, "--ways", "drafts-layer", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["tried"], list(cell["not_tried"].values())) == (0, [1])
    assert main([*asked, "--ways", "again,turn-2"]) == 1
    assert "turn-2: 1, 64 tokens were found" in capsys.readouterr().out


def test_names_stand_for_models() -> None:
    assert models.named("families,llama") == list(models.TINY)
    with pytest.raises(ValueError, match="no model lama; there are"):
        models.named("lama")
    assert len(models.named("all")) == len(FAMILIES)
    with pytest.raises(ValueError, match=r"no form as in llama:fp7; behind a colon there are fp8"):
        models.named("llama:fp8,llama:fp7")
    assert {name.partition(":")[2] for name in models.named("forms")} == {*filter(None, FORMS)}


def test_each_form_of_a_model_is_served_as_itself() -> None:
    """Other numbers than those of the model as it is, and of each other form."""
    names = ["gemma3", *(f"gemma3:{form}" for form in FORMS if form not in ("", "mxfp4"))]
    with recorded_steps() as record:
        logits = [cold_logits(name, record) for name in names]
    assert len(set(logits)) == len(names)


def cold_logits(name: str, record: StepRecord) -> tuple[bytes, ...]:
    with saved_model(name, 1) as model:
        case = MeasuredCase(model, "float32", 4, record)
        with case.engine() as engine:
            return engine.answer(model.prompts[0], case.num_tokens).digests


def test_a_form_that_a_model_cannot_be_served_in_is_no_breach() -> None:
    with recorded_steps() as record:
        (cell,) = measured_cells(
            ["mamba:fp8-pages"], ["float32"], [WAYS["again"]], record, num_prompts=1, num_tokens=4
        )
    assert cell.not_tried == {"kv_dtype=fp8: no layer of this model keeps keys and values": 1}
    assert cell.is_exact


def test_half_of_a_batch_asks_for_the_model_alone_beside_an_adapter() -> None:
    digests: list[str] = []

    def submit(engine: MeasuredEngine, request: Request) -> None:
        digests.append(request.adapter.digest)
        HostFed._submit(engine, request)

    with recorded_steps() as record, saved_model("llama:adapter", 1) as model:
        case = MeasuredCase(model, "float32", 4, record)
        with case.engine(max_running=6) as engine, pytest.MonkeyPatch.context() as patch:
            patch.setattr(MeasuredEngine, "_submit", submit)
            engine.answers(model.prompts * 6, [4] * 6, num_plain=2)
            adapter = engine._adapter(ADAPTER)
    assert digests == ["", "", *[adapter.digest] * 4]
    assert adapter.number == 2
