"""Decides which documents are held out, by their texts alone, so that no list has to be kept with the data."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from draftsmith.targets.records import Document, plain_text

HELD_OUT_EVERY = 50
LOOKED_AT = 20
"""For the first held-out document, up to this many times `every` documents are examined."""
FEW = 5
"""If there are fewer texts than this, no whole text is held out."""
TAIL = 10
"""If there are only a few texts, one part in this many of each is held out: its end."""


def is_held_out(text: str, every: int = HELD_OUT_EVERY) -> bool:
    """Whether a document belongs to the held-out split: one in `every`, by the SHA-256 of its UTF-8 bytes."""
    return place_of(text) % every == 0


def place_of(text: str) -> int:
    """Return 64 bits that depend on the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


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
        place = place_of(plain_text(document))
        held_out = place % self.every == 0 if self.one is None else place == self.one
        return (None, document) if held_out else (document, None)


def find_split(documents: Iterable[Document], every: int) -> Split:
    """Return the split of a source's documents; only the first of them are read."""
    places: set[int] = set()
    held_out, all_texts = 0, True
    for document in documents if every else ():
        text = plain_text(document)
        if not text.strip() or (place := place_of(text)) in places:
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
    """Cut off the end of a text, at the beginning of a word if there is one near."""
    at = len(text) - len(text) // TAIL
    near = max(text.rfind(" ", at // 2, at), text.rfind("\n", at // 2, at))
    at = near + 1 if near >= 0 else at
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else (text, None)
