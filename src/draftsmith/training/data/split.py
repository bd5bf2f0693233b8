"""Which documents are held out: decided by the texts alone, so no list has to travel with the data."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from draftsmith.targets.records import Document, plain_text

HELD_OUT_EVERY = 50
LOOKED_AT = 20
"""So many times that number of documents are looked at for the first one that is held out."""
FEW = 5
"""Of fewer texts than these no whole one is given up."""
TAIL = 10
"""Of each of a few texts, one part in so many is held out: its end."""


def is_held_out(text: str, every: int = HELD_OUT_EVERY) -> bool:
    """Say whether a document belongs to the held-out split: one in `every`, by the SHA-256 of its UTF-8 bytes."""
    return place_of(text) % every == 0


def place_of(text: str) -> int:
    """Return 64 bits that are a function of the text alone."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


@dataclass(frozen=True)
class Split:
    """How the documents of a source are told apart: one in `every` is held out, 0 holds out none.

    Where that would hold out none of the documents, or all of them, it is the `one` with this place. Where there are
    only a few texts, it is the end of each (`ends`); an only conversation or completion is not held out.
    """

    every: int
    one: int | None = None
    ends: bool = False

    def parts(self, document: Document) -> tuple[Document | None, Document | None]:
        """Return what of a document is trained on, and what of it is held out."""
        if self.every == 0:
            return document, None
        if self.ends:
            return _without_end(document) if isinstance(document, str) else (document, None)
        place = place_of(plain_text(document))
        held_out = place % self.every == 0 if self.one is None else place == self.one
        return (None, document) if held_out else (document, None)


def find_split(documents: Iterable[Document], every: int) -> Split:
    """Return the split of a source's documents, of which only the first ones are read."""
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
    """Cut off the end of a text, where a word begins if there is one near."""
    at = len(text) - len(text) // TAIL
    near = max(text.rfind(" ", at // 2, at), text.rfind("\n", at // 2, at))
    at = near + 1 if near >= 0 else at
    return (text[:at], text[at:]) if text[:at].strip() and text[at:].strip() else (text, None)
