"""A prompt parts from an earlier one of its owner: where, in which message, at what cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ferryman.schedule.request import SamplingParams
from ferryman.text.located_prompt import AFTER, LocatedPrompt, NamedPlace
from ferryman.wire.public import NOT_PARTED
from ferryman_router.routing.generate_request import (
    Caller,
    GenerateRequest,
    PromptOptions,
    RequestedSampling,
    Tenant,
    TokenizedRequest,
)
from ferryman_router.routing.recent_prompts import (
    Alike,
    OtherModel,
    RecentPrompts,
    Unknown,
    Unlike,
)

OWNER, OTHER = Tenant("owner", b"o"), Tenant("other", b"x")
PLACES = (NamedPlace(2, "system[0]"), NamedPlace(6, "user[0]"), NamedPlace(8, AFTER))


def spelt(token_ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


def asked(
    name: str,
    words: str,
    tenant: Tenant = OWNER,
    places: tuple[NamedPlace, ...] = PLACES,
    salt: str = "",
    adapter: str = "",
) -> TokenizedRequest:
    prompt = LocatedPrompt(np.array([ord(c) for c in words], dtype="<u4"), (), places)
    params = SamplingParams()
    caller = Caller(name, tenant, 1.0, "", correlation_id=f"{name} of mine")
    sampling, options = RequestedSampling(params), PromptOptions(cache_salt=salt)
    request = GenerateRequest(caller, "m", prompt, sampling, 0.0, options=options)
    return TokenizedRequest(request, prompt, params, frozenset(), adapter)


@pytest.fixture
def recent() -> RecentPrompts:
    return RecentPrompts(3, spelt)


def test_the_first_token_that_differs_is_named_with_its_message_and_its_neighbours(
    recent: RecentPrompts,
) -> None:
    recent.add(asked("a", "<<monday-why?>>"))
    parting = recent.nearest(asked("b", "<<mobday-why?>>"))
    assert (parting.request_id, parting.position, parting.place) == ("a of mine", 4, "system[0]")
    assert (parting.before, parting.ours, parting.theirs) == (
        "<<mo",
        "bday-why?>>",
        "nday-why?>>",
    )
    assert parting.missed_tokens == 11


def test_the_earlier_prompt_is_the_one_that_is_most_alike_and_the_latest_of_those(
    recent: RecentPrompts,
) -> None:
    for name, words in [("a", "<<system-x"), ("b", "<<system-y"), ("c", "<<sibling")]:
        recent.add(asked(name, words, places=PLACES[:2]))
    assert recent.nearest(asked("d", "<<system-z", places=PLACES[:2])).request_id == "b of mine"


@pytest.mark.parametrize(
    "words",
    ["<<system>>", "<<system>> and on", "<<syst", "<<system!!"],
    ids=["itself", "it goes on", "it is shorter", "after the messages"],
)
def test_a_prompt_that_begins_as_the_other_one_parts_nowhere(
    recent: RecentPrompts, words: str
) -> None:
    """A template's words after the last message are no part of the next prompt."""
    recent.add(asked("a", "<<system>>"))
    assert recent.nearest(asked("b", words)) == NOT_PARTED
    assert isinstance(recent.with_named(asked("b", words), "a"), Alike)


def test_no_tenant_and_no_salt_sees_the_prompts_of_another(recent: RecentPrompts) -> None:
    recent.add(asked("a", "<<secret words", OTHER))
    recent.add(asked("t", "<<twin's words", Tenant("twin", OWNER.salt)))
    recent.add(asked("a", "<<salted words", salt="s"))
    recent.add(asked("b", "<<adapted words", adapter="ab"))
    new = asked("c", "<<system")
    assert recent.nearest(new) == NOT_PARTED
    assert isinstance(recent.with_named(new, "a"), Unlike), "its owner's own, under another salt"
    assert isinstance(recent.with_named(new, "b"), OtherModel)
    assert isinstance(recent.with_named(asked("c", "<<s", OTHER), "b"), Unknown)


def test_few_prompts_of_each_tenant_are_kept(recent: RecentPrompts) -> None:
    for number in range(9):
        recent.add(asked(f"a{number}", "12345"))
        recent.add(asked(f"a{number}", "1234567"))
    recent.add(asked("x", "123", OTHER))
    assert (len(recent), recent.num_tokens) == (4, 3 * 7 + 3)
    assert isinstance(recent.with_named(asked("n", "1"), "a5"), Unknown)
    assert isinstance(recent.with_named(asked("n", "1"), "a6"), Alike)


def test_all_together_have_no_more_tokens_than_there_is_memory() -> None:
    recent = RecentPrompts(8, spelt, max_tokens=20)
    for number in range(50):
        recent.add(asked(f"a{number}", "123456", Tenant(f"t{number}", b"")))
        assert recent.num_tokens <= 20
    recent.add(asked("long", "x" * 21))
    assert (len(recent), recent.num_tokens) == (3, 18)


def test_none_are_kept_where_none_shall_be() -> None:
    recent = RecentPrompts(0, spelt)
    recent.add(asked("a", "12"))
    assert (len(recent), recent.nearest(asked("b", "13"))) == (0, NOT_PARTED)


def test_a_prompt_without_places_parts_in_words_of_the_template(recent: RecentPrompts) -> None:
    recent.add(asked("a", "abc", places=()))
    parting = recent.nearest(asked("b", "axc", places=()))
    assert (parting.place, bool(parting), bool(NOT_PARTED)) == ("the template", True, False)
