"""The arithmetic in a manifest parts state to the bit; without one, all state is of one kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cache.manifests import small_manifest

from ferryman.cache.keys import root_key
from ferryman.cache.manifest import (
    ANY_ARITHMETIC,
    Arithmetic,
    Exactness,
    Kind,
    StateManifest,
    manifest_from_json,
)

TILES = Arithmetic("cpu", "amx-bf16.sapphirerapids", "bfloat16", "2965f0ee", 1)
NAME = "cpu/amx-bf16.sapphirerapids/bfloat16/r2965f0ee/tp1"


def made_in(arithmetic: str) -> StateManifest:
    return replace(small_manifest(Kind.FULL), arithmetic=arithmetic)


def test_an_arithmetic_is_told_by_its_five_parts() -> None:
    assert str(TILES) == NAME


@pytest.mark.parametrize(
    "other",
    [
        replace(TILES, processor="cuda"),
        replace(TILES, loops="avx512-bf16.znver4"),
        replace(TILES, numbers="float32"),
        replace(TILES, revision="00000000"),
        replace(TILES, num_ranks=2),
    ],
    ids=("processor", "loops", "numbers", "revision", "ranks"),
)
def test_state_of_another_arithmetic_has_other_keys_and_is_refused_by_name(
    other: Arithmetic,
) -> None:
    here, there = made_in(NAME), made_in(str(other))
    assert here.digest != there.digest
    assert root_key(here) != root_key(there)
    assert here.differences(there) == (f"arithmetic: {NAME} here, {other} there",)


def test_a_manifest_without_a_promise_parts_from_one_with() -> None:
    bits, values = made_in(NAME), made_in(ANY_ARITHMETIC)
    assert (bits.exactness, values.exactness) == (Exactness.BITS, Exactness.VALUES)
    assert bits.differences(values)
    assert root_key(bits) != root_key(values)


def test_an_arithmetic_survives_json() -> None:
    again = manifest_from_json(made_in(NAME).text)
    assert again == made_in(NAME)
    assert again.digest == made_in(NAME).digest


def test_a_manifest_of_before_is_none() -> None:
    text = made_in(NAME).text.replace('"arithmetic"', '"something"')
    with pytest.raises(KeyError, match="arithmetic"):
        manifest_from_json(text)


def test_an_answer_of_one_arithmetic_alone_is_exact_to_the_bit() -> None:
    assert Exactness.over([NAME]) is Exactness.BITS
    assert Exactness.over([NAME, NAME]) is Exactness.BITS
    assert Exactness.over([NAME, str(replace(TILES, num_ranks=2))]) is Exactness.VALUES
    assert Exactness.over([NAME, ANY_ARITHMETIC]) is Exactness.VALUES
    assert Exactness.over([ANY_ARITHMETIC]) is Exactness.VALUES
    assert Exactness.over([""]) is Exactness.VALUES
    assert Exactness.over([]) is Exactness.VALUES


def test_several_answers_have_the_least_of_their_levels() -> None:
    bits, values = Exactness.BITS, Exactness.VALUES
    assert Exactness.least([bits, bits]) is bits
    assert Exactness.least([bits, values]) is values
    assert Exactness.least([]) is values
