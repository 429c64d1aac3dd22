"""A vocabulary as grammars see it: the bytes of every token, and how forced text is tokenized.

The bytes are those of the detokenizer's table, so what a grammar allows is what a client reads.
Tokens for which the model has no logit are none of it: no mask may allow them and no draft may be
one. A tokenizer whose decoder looks at neighbours has no such table, and serves no grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from ferryman.errors import InvalidRequest
from ferryman.text.tokenizer import Tokenizer

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class GrammarVocabulary:
    """`pieces[token_id]` are the bytes of a token; those in `control` have a name and no bytes.

    Any of `eos_token_ids` ends an output.
    """

    pieces: tuple[bytes, ...]
    control: Mapping[int, str]
    eos_token_ids: frozenset[int]
    encode: Encode

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_logits: int) -> GrammarVocabulary:
        """The vocabulary of a model with so many logits: more or fewer than the tokenizer's tokens.

        Raises InvalidRequest for a model that cannot be held to a grammar.
        """
        if tokenizer.pieces is None:
            raise InvalidRequest(
                "this model's tokenizer has no bytes for each token: no grammar is served",
                "grammar",
            )
        size = min(tokenizer.vocab_size, num_logits)
        ends = frozenset(i for i in tokenizer.eos_token_ids if i < size)
        if not ends:
            raise InvalidRequest(
                "this model names no end token: no grammar could end an output", "grammar"
            )
        names = tokenizer.encoder.get_vocab(with_added_tokens=True)
        pieces = [_text_of(tokenizer.pieces[token_id]) for token_id in range(size)]
        control = {i: name for name, i in names.items() if i < size and not pieces[i]}
        # An end token ends, even if its name would be text.
        for token_id in ends:
            pieces[token_id] = b""

        def encode(text: str) -> Sequence[int]:
            token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
            return token_ids

        return cls(tuple(pieces), control, ends, encode)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The library's view: 0.6 s and some 100 MB for 128 Ki tokens, so it is made once."""
        return LLTokenizer(TokenizerWrapper(_LibraryVocabulary(self)))

    def spelling(self, text: bytes) -> list[int]:
        """Tokens of exactly these bytes, as the tokenizer writes them if it can.

        A tokenizer may add a space in front, or compose characters; and forced text may begin
        within a character. Then it is spelt with the longest token each time.
        """
        try:
            ids = list(self.encode(text.decode()))
        except (UnicodeDecodeError, InvalidRequest):
            return self._longest_first(text)
        num_tokens = len(self.pieces)
        if all(i < num_tokens for i in ids) and b"".join(self.pieces[i] for i in ids) == text:
            return ids
        return self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        at, longest = 0, max(map(len, self._token_of), default=0)
        while at < len(text):
            ends = range(min(len(text), at + longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._token_of), None)
            if end is None:
                return token_ids  # no token begins so: the mask will say it
            token_ids.append(self._token_of[text[at:end]])
            at = end
        return token_ids

    @cached_property
    def _token_of(self) -> Mapping[bytes, int]:
        """The lowest token of each piece."""
        pairs = reversed(list(enumerate(self.pieces)))
        return {piece: token_id for token_id, piece in pairs if piece}


def _text_of(piece: bytes) -> bytes:
    """llguidance marks control tokens by this byte, which occurs in no UTF-8."""
    return b"" if piece.startswith(b"\xff") else piece


class _LibraryVocabulary:
    """The members that llguidance reads of a tokenizer."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        control = vocabulary.control
        self.eos_token_id = min(vocabulary.eos_token_ids)
        self.bos_token_id = None
        self.tokens = [
            control[token_id].encode() if token_id in control else piece
            for token_id, piece in enumerate(vocabulary.pieces)
        ]
        self.special_token_ids = sorted({*control, *vocabulary.eos_token_ids})
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.spelling(text)
