"""The audit's budget: which requests are audited, how much may be computed for it, and when.

A request is chosen by its name alone, so a run can be repeated. The work is bounded apart from
that, because a few long requests may be chosen by chance:

    audited tokens ≤ share × (tokens computed + tokens reused) + the tokens of one audit

Under load a chunk of an audit comes between two steps of requests, at most one after 1/share of
them: no answer stands still for longer than a chunk, and steps are lengthened by no more than the
share of a chunk. Where nobody waits, an audit runs through.
"""

from __future__ import annotations

import hashlib
from math import ceil

_NAMES = 2**64


def is_chosen(request_id: str, share: float) -> bool:
    """Whether a request is in the sample: a function of its name, true for `share` of all names."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * _NAMES


class AuditBudget:
    """The tokens that audits may compute: `earned` by requests, in all a `share` of theirs, and
    `spent`.

    An audit may begin while something is left, and is never cut short by what it takes: the debt
    that it leaves is earned back before the next one begins.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.earned = 0.0
        self.spent = 0
        self._steps = 0

    @property
    def is_left(self) -> bool:
        return self.earned > self.spent

    def earn(self, num_tokens: int) -> None:
        """So many tokens of requests were computed or reused."""
        self.earned += self.share * num_tokens

    def stepped(self) -> None:
        """A step of requests was submitted."""
        self._steps += 1

    @property
    def may_step_in(self) -> bool:
        """Whether a chunk of an audit may come between two steps of requests: after a share of
        them."""
        return self.share > 0.0 and self._steps >= ceil(1.0 / self.share)

    def spend(self, num_tokens: int) -> None:
        """A chunk of so many tokens is computed for an audit."""
        self.spent += num_tokens
        self._steps = 0
