"""Names keep their promised form for any source of randomness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferryman import ids
from ferryman.errors import InvalidRequest


def zeros(_num_bits: int) -> int:
    return 0


def ones(num_bits: int) -> int:
    return (1 << num_bits) - 1


@pytest.mark.parametrize("bits", [zeros, ones])
def test_names_have_their_form_at_both_ends_of_the_range(bits: ids.RandomBits) -> None:
    assert 0 < ids.make_epoch(bits) < 2**63
    assert len(ids.worker_id_of("decode", ids.make_life_secret(bits))) == len("decode-") + 16
    assert ids.check_request_id(ids.make_request_id(bits))
    assert ids.check_request_id(ids.make_reservation_id(bits))


def test_two_processes_get_different_names() -> None:
    makers = (ids.make_epoch, ids.make_request_id, ids.make_reservation_id)
    assert all(make() != make() for make in makers)


@pytest.mark.parametrize("text", ["", "a b", "a.b", "ä", "a\n", "*", ">", "x" * 65])
def test_a_request_id_that_is_no_nats_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="request id") as caught:
        ids.check_request_id(text)
    assert caught.value.param == "request_id"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["a", "A-b_9", "x" * 64])
def test_a_request_id_of_a_caller_is_taken_over(text: str) -> None:
    assert ids.check_request_id(text) == text


def test_a_role_is_lower_case() -> None:
    with pytest.raises(AssertionError, match="lower case"):
        ids.worker_id_of("Decode", ids.make_life_secret())


@given(
    st.binary(min_size=16, max_size=16), st.binary(max_size=20), st.sampled_from(["decode", "x"])
)
def test_only_the_secret_of_a_life_proves_its_id(life: bytes, other: bytes, role: str) -> None:
    secret = life.hex()
    worker_id = ids.worker_id_of(role, secret)
    assert ids.proves(secret, worker_id)
    assert ids.proves(other.hex(), worker_id) == (other == life)
    assert not ids.proves(worker_id, worker_id)
    assert not ids.proves(secret, worker_id[:-1])


@pytest.mark.parametrize("worker_id", ["", "decode", "decode-1", "Decode-" + 16 * "0", "-"])
def test_nothing_proves_an_id_of_another_form(worker_id: str) -> None:
    assert not ids.proves("", worker_id)
    assert not ids.proves(ids.make_life_secret(), worker_id)
