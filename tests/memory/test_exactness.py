"""The exactness that a worker holds: bits where every path has one order of sums, else values."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.quantised_folders import RECIPES, save_quantised
from tests.tiny_models import save_tiny_model

import ferryman.model
from ferryman.cache.manifest import ANY_ARITHMETIC, Exactness
from ferryman.engine.engine import build_engine
from ferryman.errors import ConfigError
from ferryman.llm import LLM
from ferryman.settings.engine import EngineOptions
from ferryman.sizing.exactness import arithmetic_of, check_audit
from ferryman.sizing.memory_plan import MemoryPlan
from ferryman_kernels.cpu.arithmetic import card_revision, has_one_order, kernel_revision
from ferryman_launcher.checks.option_checks import _check_arithmetics

compiled = pytest.mark.skipif(
    not has_one_order(torch.float32), reason="the loops need AVX-512 and numba"
)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without recurrences."""
    return save_tiny_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bamba"), "bamba")


def options(model: Path, **chosen: object) -> EngineOptions:
    return EngineOptions.model_validate({"model": model, "page_size": 16, **chosen})


@compiled
def test_a_processor_with_loops_promises_bits_and_names_how_it_computes(attention: Path) -> None:
    name = arithmetic_of(options(attention))
    assert Exactness.under(name) is Exactness.BITS
    assert re.fullmatch(r"cpu/avx512\.[a-z0-9-]+/float32/r[0-9a-f]{8}/tp1", name)
    narrow = arithmetic_of(options(attention, dtype="bfloat16"))
    assert "/bfloat16/" in narrow
    assert arithmetic_of(options(attention, tp_size=2)) == name.replace("/tp1", "/tp2")
    assert arithmetic_of(options(attention, exactness="bits")) == name
    assert f"/r{kernel_revision(Path(ferryman.model.__path__[0]))}/" in name, "models count, too"


def test_values_are_chosen_and_have_no_arithmetic_of_their_own(attention: Path) -> None:
    for tp_size in (1, 2):
        chosen = options(attention, exactness="values", tp_size=tp_size)
        assert arithmetic_of(chosen) == ANY_ARITHMETIC


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"device": "cuda"}, "there is no card cuda here"),
        ({"device": "cuda", "dtype": "float64"}, "torch multiplies float64 on a card"),
        ({"device": "cuda", "tp_size": 2}, "NCCL"),
        ({"dtype": "float64"}, "torch multiplies float64"),
    ],
)
def test_bits_are_refused_with_the_reason_where_they_cannot_be_held(
    attention: Path, chosen: dict[str, object], why: str
) -> None:
    assert arithmetic_of(options(attention, **chosen)) == ANY_ARITHMETIC
    with pytest.raises(ConfigError, match=f"exactness=bits: .*{why}.*or say values"):
        arithmetic_of(options(attention, **chosen, exactness="bits"))


CARDS = {0: ((9, 0), "NVIDIA H200"), 1: ((9, 0), "NVIDIA H100 80GB HBM3")}


@pytest.fixture
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CARDS))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: CARDS[index][0])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: CARDS[index][1])


@pytest.mark.usefixtures("_two_cards")
@pytest.mark.parametrize("chosen", [{}, {"quantize": "int8"}, {"kv_dtype": "fp8"}])
def test_a_card_promises_bits_where_they_are_asked_for_and_is_named_by_its_class(
    hybrid: Path, chosen: dict[str, object]
) -> None:
    asked = options(hybrid, device="cuda", dtype="bfloat16", **chosen)
    assert arithmetic_of(asked) == ANY_ARITHMETIC, "nothing has been measured yet"
    named = arithmetic_of(asked.model_copy(update={"exactness": "bits"}))
    assert re.fullmatch(r"cuda/9\.0-nvidia-h200/bfloat16/r[0-9a-f]{8}/tp1", named)
    other = asked.model_copy(update={"exactness": "bits", "device": "cuda:1"})
    assert "/9.0-nvidia-h100-80gb-hbm3/" in arithmetic_of(other)


@pytest.mark.usefixtures("_two_cards")
def test_means_of_whole_rows_promise_values_on_a_card(
    attention: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman.sizing.exactness._FAMILIES_WITH_MEANS", ("gemma3",))
    refused = options(attention, device="cuda", dtype="bfloat16", exactness="bits")
    with pytest.raises(ConfigError, match="means of whole rows"):
        arithmetic_of(refused)


@pytest.mark.usefixtures("_two_cards")
def test_an_audit_on_a_card_needs_bits_to_be_asked_for(attention: Path) -> None:
    on_card = options(attention, device="cuda", dtype="bfloat16")
    audited = on_card.model_copy(update={"audit_share": 0.5})
    with pytest.raises(ConfigError, match="under exactness=bits alone"):
        check_audit(audited)
    check_audit(audited.model_copy(update={"exactness": "bits"}))


def test_what_compiles_for_a_card_is_part_of_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    before = card_revision()
    card_revision.cache_clear()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert card_revision() != before
    card_revision.cache_clear()


@compiled
@pytest.mark.parametrize("chosen", [{}, {"quantize": "int8"}, {"kv_dtype": "fp8"}])
def test_a_recurrence_int8_and_fp8_pages_promise_bits(
    hybrid: Path, chosen: dict[str, object]
) -> None:
    assert Exactness.under(arithmetic_of(options(hybrid, **chosen))) is Exactness.BITS


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("recipe", ["fp8 by block", "gptq int4, zeros and order", "awq"])
def test_codes_of_a_checkpoint_promise_bits(recipe: str, dtype: str, tmp_path: Path) -> None:
    plain = save_tiny_model(tmp_path / "plain", "bamba")
    folder = save_quantised(plain, tmp_path / "coded", RECIPES[recipe])
    assert Exactness.under(arithmetic_of(options(folder, dtype=dtype))) is Exactness.BITS


@pytest.mark.parametrize(
    ("chosen", "why"), [({"dtype": "float64"}, "float64"), ({"exactness": "values"}, "values")]
)
def test_an_audit_is_refused_where_sound_state_may_have_other_bits(
    attention: Path, chosen: dict[str, object], why: str
) -> None:
    audited = options(attention, audit_share=0.01, **chosen)
    refused = pytest.raises(ConfigError, match=rf"audit_share=0\.01: .*{why}.*leave out the audit")
    with refused, build_engine(audited):
        pass


def test_without_compiled_loops_there_are_values(
    attention: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ferryman.sizing.exactness.has_one_order", lambda dtype: False)
    assert arithmetic_of(options(attention)) == ANY_ARITHMETIC


def plan_of(*workers: EngineOptions) -> MemoryPlan:
    """The plan of a prefill worker and a decode worker, as far as their options go."""
    named = zip(("prefill", "decode"), workers, strict=True)
    roles = [SimpleNamespace(role=role, options=worker) for role, worker in named]
    return cast(MemoryPlan, SimpleNamespace(workers=roles))


@compiled
def test_roles_of_unlike_arithmetics_are_refused_before_any_process_starts(attention: Path) -> None:
    def plan(exactness: str) -> MemoryPlan:
        prefill = options(attention, exactness=exactness)
        return plan_of(prefill, options(attention, exactness=exactness, tp_size=2))

    with pytest.raises(ConfigError, match=r"/tp1 for prefill workers and .*/tp2 for decode"):
        _check_arithmetics(plan("auto"))
    _check_arithmetics(plan("values"))


@pytest.mark.parametrize(
    ("chosen", "why"),
    [({"exactness": "values"}, "values"), ({"dtype": "float64"}, "float64")],
)
def test_an_audit_that_no_worker_would_start_with_is_refused_before_any_process_starts(
    attention: Path, chosen: dict[str, object], why: str
) -> None:
    prefill = options(attention, **chosen)
    decode = options(attention, **chosen, audit_share=0.01)
    with pytest.raises(ConfigError, match=rf"audit_share=0\.01: .*{why}.*leave out the audit"):
        _check_arithmetics(plan_of(prefill, decode))
    _check_arithmetics(plan_of(prefill, prefill))


def test_an_engine_refuses_before_it_reads_a_weight(attention: Path) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    refused = options(attention, dtype="float64", exactness="bits")
    with pytest.raises(ConfigError, match="exactness=bits"), build_engine(refused, read):
        pass


@compiled
def test_an_engines_manifest_and_completions_say_which_level_holds(attention: Path) -> None:
    for exactness in ("bits", "values"):
        with LLM(
            attention, dtype="float32", page_size=16, memory_bytes=1 << 24, exactness=exactness
        ) as llm:
            manifest = llm._engine.manifest
            (answer,) = llm.generate([3, 4, 5])
        assert manifest.exactness.value == exactness
        assert answer.exactness.value == exactness
        assert manifest.arithmetic == arithmetic_of(options(attention, exactness=exactness))
