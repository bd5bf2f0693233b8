"""Decides which documents are held out, by their texts alone, so that no list has to be kept with the data."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from draftsmith.targets.records import Completion, Document, plain_text
from draftsmith.targets.token_ids import ASSISTANT, Message

HELD_OUT_EVERY = 50
LOOKED_AT = 20
"""For the first held-out document, up to this many times `every` documents are examined."""
FEW = 5
"""If there are fewer texts than this, no whole text is held out."""
TAIL = 10
"""If there are only a few texts, one part in this many of each is held out: its end."""


def is_held_out(text: str, every: int = HELD_OUT_EVERY) -> bool:
    """Whether a text belongs to the held-out split: one in `every`, by the SHA-256 of its UTF-8 bytes."""
    return place_of(text) % every == 0


def place_of(text: str) -> int:
    """Return 64 bits that depend on the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def key_of(document: Document) -> str:
    """Return the text by which a document is held out or not; documents with the same key are on the same side.

    It is the prompt of a completion, and what comes before the first turn of the assistant's in a conversation: what
    τ is measured behind must not have been learnt with another answer. White space around it does not count.
    """
    if isinstance(document, Completion):
        return (document.prompt if document.prompt.strip() else document.completion).strip()
    if isinstance(document, str):
        return document.strip()
    turns = [at for at, message in enumerate(document.messages) if at and message["role"] == ASSISTANT]
    messages = document.messages[: turns[0]] if turns else document.messages
    return plain_text(replace(document, messages=[_stripped(message) for message in messages]))


def _stripped(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


@dataclass(frozen=True)
class Split:
    """How the documents of a source are split: one in `every` is held out, 0 holds out none.

    If that would hold out none or all of the documents, only the document with the place `one` is held out. If there
    are only a few texts, the end of each is held out (`ends`); a single conversation or completion is not.
    """

    every: int
    one: int | None = None
    ends: bool = False

    def parts(self, document: Document) -> tuple[Document | None, Document | None]:
        """Return the part of a document that is trained on, and the part that is held out."""
        if self.every == 0:
            return document, None
        if self.ends:
            return _without_end(document) if isinstance(document, str) else (document, None)
        place = place_of(key_of(document))
        held_out = place % self.every == 0 if self.one is None else place == self.one
        return (None, document) if held_out else (document, None)


def find_split(documents: Iterable[Document], every: int) -> Split:
    """Return the split of a source's documents; only the first of them are read."""
    places: set[int] = set()
    held_out, all_texts = 0, True
    for document in documents if every else ():
        if not plain_text(document).strip() or (place := place_of(key_of(document))) in places:
            continue
        places.add(place)
        held_out += place % every == 0
        all_texts = all_texts and isinstance(document, str)
        if (len(places) >= FEW and 0 < held_out < len(places)) or len(places) > LOOKED_AT * every:
            return Split(every)
    if len(places) == 1 or (all_texts and 0 < len(places) < FEW):
        return Split(every, ends=True)
    return Split(every) if not places or 0 < held_out < len(places) else Split(every, one=min(places))


def _without_end(text: str) -> tuple[str, str | None]:
    """Cut off the end of a text, at the beginning of a word if there is one near.

    White space around the text does not move the cut, so that two texts that differ in it alone are cut alike.
    """
    begin, length = len(text) - len(text.lstrip()), len(text.strip())
    at = length - length // TAIL
    low, high = begin + at // 2, begin + at
    near = max(text.rfind(" ", low, high), text.rfind("\n", low, high))
    at = near + 1 if near >= 0 else high
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else (text, None)
