"""The tokenizer of a folder or a GGUF file: vocabulary, special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ferryman.cache.keys import TokenIds
from ferryman.errors import ConfigError, InvalidRequest
from ferryman.gguf.documents import has_document, read_document
from ferryman.text.chat import NO_VARIABLES, ChatTemplate, Message
from ferryman.text.chat_beginnings import ChatBeginnings
from ferryman.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from ferryman.text.pieces import PieceTable, ShownPieces, piece_table
from ferryman.text.system_messages import SystemMessages
from ferryman.text.text_encoder import TextEncoder
from ferryman.text.tool_calls.call_ids import CallIds
from ferryman.text.vocabulary.vocabulary_files import read_vocabulary

CONTINUES = "continue_final_message"  # the variable
# The fields of a message that an answer may go on with. A thought is one if there is no text.
_CONTINUED = ("content", "reasoning_content")
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # no template strips it, or looks for it
NO_TOKENS: frozenset[str] = frozenset()
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. `eos_token_ids` end a generation unless `ignore_eos` is set."""

    text_encoder: TextEncoder
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    pieces: PieceTable | None

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Reads a model folder or a GGUF file; raises ConfigError naming the file that is missing
        or unusable."""
        folder = Path(folder)
        config = _read_json_if_there(folder / "tokenizer_config.json")
        path, description = read_vocabulary(folder, config)
        text_encoder = TextEncoder.of(path, description)
        encoder = text_encoder.honouring
        return cls(
            text_encoder,
            _eos_token_ids(folder, config, encoder),
            _chat_template(folder, config),
            piece_table(description, encoder.get_vocab(with_added_tokens=True)),
        )

    @property
    def encoder(self) -> Any:
        """The library's own tokenizer, which honours control tokens at any place in a text."""
        return self.text_encoder.honouring

    @cached_property
    def system_messages(self) -> SystemMessages:
        """The places where the chat template takes system messages; all without a template."""
        if self.chat_template is None:
            return SystemMessages(takes_one=True, takes_several=True, takes_later=True)
        return SystemMessages.of(self.chat_template)

    @cached_property
    def call_ids(self) -> CallIds:
        """The ids of calls that the chat template takes; any without a template."""
        return CallIds.of(self.chat_template) if self.chat_template else CallIds(None)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id of the vocabulary."""
        return max(self.encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def max_token_bytes(self) -> int | None:
        """The most bytes of a text that one token can stand for; None: there is no bound."""
        return self.text_encoder.max_token_bytes

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> TokenIds:
        """Token ids of `text`, [tokens]. Without `parse_special` the name of a control token is
        ordinary text.

        Raises InvalidRequest for lone surrogates, which are not text, and ContextLengthExceeded for
        more than `max_tokens`. If the bytes alone are too many, it raises before it tokenizes.
        """
        return self.text_encoder.encode(
            text,
            add_special_tokens=add_special_tokens,
            parse_special=parse_special,
            max_tokens=max_tokens,
            param="prompt",
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        variables: Mapping[str, Any] = NO_VARIABLES,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> TokenIds:
        """Token ids of a conversation, [tokens], whose system messages stand where the template
        takes them, and whose calls have ids that it takes. The template's own control tokens are
        honoured. Those in the messages and variables are text unless `parse_special` is set.
        Raises as `encode` does."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template", "messages")
        messages = self.call_ids.fitted(self.system_messages.fitted(messages)).messages
        words = list(_words([messages, variables]))
        marks = None if parse_special else self.text_encoder.marks_for(words)
        if marks is None:
            return self.text_encoder.encode(
                _rendered(self.chat_template, messages, variables),
                add_special_tokens=False,
                parse_special=True,
                max_tokens=max_tokens,
                param="messages",
            )
        mark = partial(self.text_encoder.marked, marks=marks)
        rendered = _rendered(self.chat_template, _mapped(messages, mark), _mapped(variables, mark))
        return self.text_encoder.encode_marked(
            rendered, marks, max_tokens=max_tokens, param="messages"
        )

    @cached_property
    def chat_beginnings(self) -> ChatBeginnings:
        """The beginnings of conversations that were asked for so far."""
        return ChatBeginnings(self.encode_chat)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once; without control tokens, unless they shall be in it."""
        ids = [int(i) for i in token_ids]
        return str(self.encoder.decode(ids, skip_special_tokens=skip_special_tokens))

    def spelt(self, token_ids: Sequence[int]) -> str:
        """The text of token ids with the names of control tokens."""
        return self.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, for showing logprobs; a special token gives its name."""
        piece = self.pieces[token_id] if self.pieces is not None else b""
        return piece or (self.encoder.id_to_token(token_id) or "").encode()

    def detokenizer(
        self, context: Sequence[int] = (), visible: frozenset[str] = NO_TOKENS
    ) -> Detokenizer:
        """A new detokenizer for text that follows `context`, the last tokens of the prompt. The
        control tokens named in `visible` are part of the text."""
        names = {self.encoder.token_to_id(name): name for name in visible & self.control_tokens}
        if self.pieces is not None:
            pieces = {token_id: name.encode() for token_id, name in names.items()}
            return ByteDetokenizer(ShownPieces(self.pieces, pieces) if pieces else self.pieces)
        decode = partial(self._decode_showing, frozenset(names)) if names else self.decode
        return WindowDetokenizer(decode, [int(i) for i in context[-8:]])

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """The names of all tokens that are left out of a text."""
        return frozenset(self.text_encoder.names)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(map(self.encoder.token_to_id, self.control_tokens))

    def _decode_showing(self, visible: frozenset[int], token_ids: Sequence[int]) -> str:
        left_out = self._control_ids - visible
        kept = [token_id for token_id in token_ids if token_id not in left_out]
        return self.decode(kept, skip_special_tokens=False)


def _rendered(
    template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]
) -> str:
    """With CONTINUES the text ends where the last message does: the answer goes on with it."""
    rendered = template.render(messages, variables)
    if not variables.get(CONTINUES):
        return rendered
    last = messages[-1]
    field = next((name for name in _CONTINUED if str(last.get(name) or "").strip()), "")
    if field:
        # Its words may stand in the text behind it, too, as "end" does in <|im_end|>.
        longer = {**last, field: f"{last[field]}{_PLACE}"}
        before, place, _ = template.render([*messages[:-1], longer], variables).rpartition(_PLACE)
        # Most templates strip what they show.
        for beginning in (before, before.rstrip()):
            if place and rendered.startswith(beginning):
                return beginning
    message = "there is no text in the last message, as it is rendered, to go on with"
    raise InvalidRequest(message, CONTINUES)


def _words(value: Any) -> Iterator[str]:
    """All strings in a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _words(pair)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _words(element)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON value with all its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(element, change) for element in value]
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: Any = read_document(path)
        if value is None:
            value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if has_document(path) else {}


def _eos_token_ids(folder: Path, config: Mapping[str, Any], encoder: Any) -> frozenset[int]:
    """All ids that any file of the folder names as an end: generation config, config, tokenizer."""
    token_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json_if_there(folder / name).get("eos_token_id")
        token_ids.update(value if isinstance(value, list) else [value] if value is not None else [])
    token = _token_name(config.get("eos_token"))
    token_id = encoder.token_to_id(token) if token else None
    return frozenset(token_ids if token_id is None else {*token_ids, token_id})


def _token_name(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    sources = _template_sources(folder, config)
    if "default" not in sources:
        return None
    return ChatTemplate(
        sources["default"], _special_tokens(folder, config), sources.get("tool_use", "")
    )


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name, from files or else from the tokenizer's config."""
    path = folder / "chat_template.jinja"
    if path.exists():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {"default": path, **{other.stem: other for other in others}}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    match config.get("chat_template"):
        case str(source):
            return {"default": source}
        case [*named]:
            return {str(entry["name"]): str(entry["template"]) for entry in named}
    return {}


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may name; the tokenizer's config has the last word."""
    more = config.get("extra_special_tokens")
    entries = {
        **_read_json_if_there(folder / "special_tokens_map.json"),
        **(more if isinstance(more, Mapping) else {}),
        **{name: config[name] for name in _SPECIAL_NAMES if config.get(name) is not None},
    }
    named = {name: _token_name(value) for name, value in entries.items()}
    return {name: token for name, token in named.items() if token}
