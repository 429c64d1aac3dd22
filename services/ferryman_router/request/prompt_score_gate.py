"""The log probabilities of a request's prompt at the router: whole, or none.

    prefill's stream   ──pieces──► PromptScoreGate ──whole──► output log
    decode's stream    ──tokens──► held until then

The two streams are of two workers, so tokens may overtake the scores. No token of the answer counts
before the scores are whole. So a prefill worker that dies between two pieces loses the attempt as
one that dies in mid-prompt does, and a client never sees a part of the scores.
"""

from __future__ import annotations

from ferryman.errors import CorruptState
from ferryman.schedule.prompt_scores import PromptScores, ScoreBook
from ferryman.wire.values import RequestTokens
from ferryman_router.routing.generate_request import TokenizedRequest


class PromptScoreGate:
    """The scores of one request, over all its attempts. If it asks for none, they are whole from
    the beginning."""

    def __init__(self, asked: TokenizedRequest) -> None:
        is_wanted = asked.params.prompt_logprobs is not None
        # The first token of a prompt has no score.
        self._book = ScoreBook(asked.prompt_len if is_wanted else 1)
        self._held: list[RequestTokens] = []

    @property
    def is_whole(self) -> bool:
        return self._book.is_whole

    @property
    def pieces(self) -> tuple[PromptScores, ...]:
        """The scores, in order. Read them when they are whole."""
        return self._book.parts()

    def begin_attempt(self) -> None:
        """Drops scores that are not whole, and the tokens that the last attempt drew after
        them."""
        self._held.clear()
        self._book.begin_attempt()

    def hold(self, tokens: RequestTokens) -> bool:
        """Whether these tokens came too early, and are kept until the scores are whole."""
        if self.is_whole:
            return False
        self._held.append(tokens)
        return True

    def add(self, piece: PromptScores) -> tuple[RequestTokens, ...]:
        """Takes a piece; the tokens that it was the last to hold up. A piece that comes again, or
        after whole scores, changes nothing. Raises CorruptState for one that does not follow."""
        self._book.add(piece)
        if not self.is_whole:
            return ()
        released = tuple(self._held)
        self._held.clear()
        return released

    def check_handed_off(self) -> None:
        """Raises CorruptState unless the scores are whole: no piece comes after a hand-off."""
        if not self.is_whole:
            raise CorruptState(f"scores from token {self._book.end} on are lacking")
