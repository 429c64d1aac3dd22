"""Signatures: RFC 8032's own vectors, and bytes to sign that no other values share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman.security.order_signatures import OrderSigner, OrderVerifier, statement

# RFC 8032, 7.1: secret key, public key, message, signature.
VECTORS = [
    pytest.param(
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        id="test 1",
    ),
    pytest.param(
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        id="test 2",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_the_vectors_of_rfc_8032(seed: str, public: str, message: str, signature: str) -> None:
    signer, signed = OrderSigner(seed), bytes.fromhex(message)
    assert signer.public_key == public
    assert signer.sign(signed).hex() == signature
    assert OrderVerifier([public]).verifies(bytes.fromhex(signature), signed)


@pytest.mark.parametrize("bit", range(0, 512, 7))
def test_one_bit_of_a_signature_matters(bit: int) -> None:
    signer = OrderSigner("07" * 32)
    signature = bytearray(signer.sign(b"an order"))
    verifier = OrderVerifier([signer.public_key])
    assert verifier.verifies(bytes(signature), b"an order")
    signature[bit // 8] ^= 1 << bit % 8
    assert not verifier.verifies(bytes(signature), b"an order")


@pytest.mark.parametrize("signature", [b"", b"\0" * 63, b"\0" * 64, b"\0" * 65])
def test_what_is_no_signature_is_of_nobody(signature: bytes) -> None:
    verifier = OrderVerifier([OrderSigner("07" * 32).public_key])
    assert not verifier.verifies(signature, b"an order")


class Colour(StrEnum):
    RED = "red"


class Shape(Enum):
    SQUARE = 4


@dataclass(frozen=True)
class Pair:
    left: object
    right: object


@dataclass(frozen=True)
class Double:
    left: object


# No two of them are equal.
VALUES = [
    (), ("",), (b"",), (None,), (0,), (1,), (-1,), (10,), (0.5,), (-0.5,), ("1",), (b"1",), ((),),
    ((1,),), (((1,),),), (1, 1), ((1, 1),), ("1", "1"), ("11",), ("a", "b"), ("ab",), ("", "ab"),
    (Pair(1, 2),), (Pair(2, 1),), (Pair(1, None),), (Double(1),), (frozenset({1, 2}),),
    (frozenset({1, 3}),), (Colour.RED,), (Shape.SQUARE,), (2**63,), (1e300,), ("\udcff",),
]  # fmt: skip


def test_no_two_values_give_the_same_bytes() -> None:
    made = [statement("test", *values) for values in VALUES]
    assert all(left != right for left, right in combinations(made, 2))
    assert statement("test", 1) != statement("other", 1)
    assert statement("test", "x") != statement("testx")


def test_equal_values_give_the_same_bytes() -> None:
    """Also after a journey: a message has real numbers where a caller may have written 1."""
    assert statement("test", 1, (2, 3)) == statement("test", 1.0, [2, 3.0])
    assert statement("test", frozenset({3, 1, 2})) == statement("test", (1, 2, 3))
    assert statement("test", Colour.RED) == statement("test", "red")


@given(left=st.lists(st.text() | st.binary()), right=st.lists(st.text() | st.binary()))
def test_bounds_between_texts_are_signed(left: list[str | bytes], right: list[str | bytes]) -> None:
    assert (statement("test", *left) == statement("test", *right)) is (left == right)


def test_a_value_without_an_encoding_is_refused() -> None:
    with pytest.raises(TypeError, match="dict is not signed"):
        statement("test", {})
