"""The kinds of records in a data set: a text, a conversation, or a prompt with its completion."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.targets.token_ids import ASSISTANT, Conversation, Message
from draftsmith.text_files import excerpt, names_in_words
from draftsmith.types import DraftsmithError

FIELDS = ("text", "messages", "conversations", "prompt")

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool",
}
"""The roles that ShareGPT's words stand for; other words are taken as they are."""


@dataclass(frozen=True)
class Completion:
    """A text whose first part was given and whose second part is to be learnt."""

    prompt: str
    completion: str


Document = str | Conversation | Completion


class UnusableRecord(DraftsmithError):
    """A record that training leaves out; `reason` says why, in words by which such records are counted."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class NotText(UnusableRecord):
    """A record has something else where a text belongs."""

    def __init__(self, where: str, field: str, value: Any) -> None:
        kind = kind_of(value)
        super().__init__(
            f"with {kind} instead of a text",
            f"{where} has {kind} as `{field}` ({excerpt(repr(value))}) instead of a text; put it in quotes, or remove "
            "the record.",
        )


class HalfCharacter(UnusableRecord):
    """A record has one half of a surrogate pair, as texts have that were cut in the middle of an emoji: JSON can hold
    it as an escape, but no tokenizer can read it."""

    def __init__(self, where: str, half: str) -> None:
        super().__init__(
            "with half a character",
            f"{where} has half a character ({half!r}) in its text; remove it, or the record.",
        )


def kind_of(value: Any) -> str:
    """Return what a value of JSON is, in words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "an object"
    if value is None:
        return "null"
    return "a list" if isinstance(value, Sequence) else f"a value of type {type(value).__name__}"


def read_record(record: Mapping[str, Any], where: str) -> Document:
    """Return what a record holds; fields that exist but are empty count as an empty text.

    A conversation also passes the record's `tools` and `documents`, and the contents of its `chat_template_kwargs`, on
    to the chat template.

    Raises:
        UnusableRecord: the record has a number, say, where a text belongs, or half a character in it.
        DraftsmithError: the record has none of the known fields, or a message without role or content.
    """
    document = _document(record, where)
    shown = plain_text(document)
    if isinstance(document, Conversation) and document.more:
        shown += json.dumps(document.more, ensure_ascii=False, default=str)
    try:
        shown.encode()
    except UnicodeEncodeError as error:
        raise HalfCharacter(where, shown[error.start]) from error
    return document


def _document(record: Mapping[str, Any], where: str) -> Document:
    text = record.get("text")
    if isinstance(text, str) and text.strip():
        return text
    turns = record.get("messages") or record.get("conversations")
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if isinstance(prompt, str | list) and isinstance(completion, str | list):
        turns = [*_turns(prompt, "user"), *_turns(completion, ASSISTANT)]
    if turns:
        return _conversation(turns, record, where)
    known = [name for name in FIELDS if name in record]
    if not known or (known == ["prompt"] and "completion" not in record):
        raise DraftsmithError(
            f"{where} has neither `text` nor `messages`, `conversations` or `prompt` and `completion` (it has "
            f"{names_in_words(list(record)) if record else 'nothing'}); name one of its fields so."
        )
    for name in ("text", *(("prompt", "completion") if "prompt" in known else ())):
        value = record.get(name)
        if not (_is_missing(value) or isinstance(value, str) or (name != "text" and isinstance(value, list))):
            raise NotText(where, name, value)
    return ""


def _is_missing(value: Any) -> bool:
    """Whether nothing is in a field; in tables, missing values are often read as NaN."""
    return value is None or value in ([], {}) or (isinstance(value, float) and math.isnan(value))


def _turns(said: str | list[Any], role: str) -> list[Any]:
    """Return messages; a text becomes one message with that role, an empty text becomes none."""
    if isinstance(said, list):
        return said
    return [{"role": role, "content": said}] if said.strip() else []


def _conversation(turns: Any, record: Mapping[str, Any], where: str) -> Conversation:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DraftsmithError(
            f"{where} has messages that are no list but {excerpt(repr(turns))}; give a list of messages."
        )
    messages = [_message(turn, where) for turn in turns]
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    kwargs = _unquoted(record, "chat_template_kwargs", where) or {}
    if not isinstance(kwargs, Mapping):
        raise DraftsmithError(
            f"{where} has {kind_of(kwargs)} as `chat_template_kwargs` ({excerpt(repr(kwargs))}); give an object."
        )
    more = dict(kwargs)
    for name in ("tools", "documents"):
        value = _unquoted(record, name, where)
        if value:
            more[name] = value
    return Conversation(messages, more)


def _unquoted(record: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field of a record; some data sets store lists and objects as JSON in a string."""
    value = record.get(name)
    if not (isinstance(value, str) and value.strip()):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DraftsmithError(f"{where} has `{name}` that are no JSON ({error}); fix them.") from error


def _message(turn: Any, where: str) -> Message:
    if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
        word = str(turn["from"])
        return {"role": ROLES.get(word, word), "content": turn["value"]}
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise DraftsmithError(f"{where} has a message without `role` or `content`; give each message both.")
    if not ("content" in turn or "tool_calls" in turn):
        raise DraftsmithError(f"{where} has a message without `role` or `content`; give each message both.")
    # Tables have a value in every column; a column that a message does not use is empty there.
    return {name: value for name, value in turn.items() if value is not None or name == "content"}


def plain_text(document: Document) -> str:
    """Return a text that stands for a document; it decides whether the document is held out, and how long it is."""
    if isinstance(document, str):
        return document
    if isinstance(document, Completion):
        return document.prompt + document.completion
    return json.dumps([dict(message) for message in document.messages], ensure_ascii=False, sort_keys=True, default=str)
