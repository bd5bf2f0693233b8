"""Splits texts into parts to train, tune and measure on, separated by where they come from, and checks the separation.

A source is a package, a book or a template: whatever a record names as its `source`. No source is in two parts. Where
the data name no sources, or too few, whole documents are separated instead; with too few documents, the beginning,
middle and end of each. A training text is left out if another part has the same text, or 13 of its words in a row.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from draftsmith.targets.records import Completion, Document
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.sources import cut_text
from draftsmith.types import DraftsmithError

TRAINING, TUNING, MEASURED = "training", "tuning", "measured"
PARTS = (TRAINING, TUNING, MEASURED)
SOURCE, DOCUMENT, PLACE = "source", "document", "place"
"""By what the parts may be separated."""
WINDOW = 13
"""If two texts share this many words in a row, a model that read one knows part of the other (arXiv:2005.14165)."""
COMMON = 10
"""A run of words that more documents than this contain is a heading or a licence, and does not count as shared."""
MOST_TUNING, MOST_MEASURED = 20, 40
"""However many sources or documents there are, at most this many are kept out of the training."""
PIECE = 2000
"""Long texts are cut into pieces of this many characters; each piece is drawn, and left out, like a text of its own."""
OWN_SOURCE = "of a source of the prompts"
SAME_TEXT = "the same text as one of another part"
SAME_WORDS = f"{WINDOW} words in a row of another part"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one, with its task and its source; the source is "" where the data name none."""

    task: str
    source: str
    content: Document

    @cached_property
    def words(self) -> list[str]:
        """Its words in lower case, without system prompts, which many conversations have in common."""
        return _WORD.findall(said(self.content).lower())

    @cached_property
    def key(self) -> str:
        """A hash that is the same for texts with the same words."""
        return hashlib.sha256(" ".join(self.words).encode("utf-8", "surrogatepass")).hexdigest()

    def windows(self) -> set[int]:
        """Return a hash of every run of `WINDOW` words in it."""
        words = self.words
        return {hash(" ".join(words[at : at + WINDOW])) for at in range(len(words) - WINDOW + 1)}

    def pieces(self) -> list["Text"]:
        """Return the text cut into pieces if it is long; conversations and completions stay whole."""
        if not isinstance(self.content, str):
            return [self]
        return [replace(self, content=part) for part in cut_text(self.content, PIECE)]


Parts = dict[str, list[Text]]


@dataclass(frozen=True)
class Found:
    """Result of the check: `shared` counts what two parts still have in common, `left_out` what was removed, by reason.

    `common` counts runs of words that two parts share but that were ignored because many documents have them.
    """

    left_out: Mapping[str, int]
    shared_sources: Sequence[str]
    shared_texts: int
    shared_windows: int
    common: int


def said(content: Document) -> str:
    """Return the words of a document as one text."""
    if isinstance(content, Conversation):
        turns = [message for message in content.messages if message["role"] != "system"]
        return "\n".join(str(turn.get("content") or "") for turn in turns)
    return content.prompt + content.completion if isinstance(content, Completion) else content


def deal(names: Iterable[str], measured: bool = True) -> dict[str, str]:
    """Assign each name to a part: about a third is measured on, a sixth is tuned on.

    The assignment depends on the names alone. A single name is trained on; of two names, one is measured on (or tuned
    on, where nothing is to be measured on).
    """
    ranked = sorted(set(names), key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest())
    total = len(ranked)
    kept = min(MOST_MEASURED, max(1, round(total / 3))) if measured and total > 1 else 0
    tuned = min(MOST_TUNING, max(1, round(total / 6))) if total - kept > 1 else 0
    parts = [MEASURED] * kept + [TUNING] * tuned + [TRAINING] * (total - kept - tuned)
    return dict(zip(ranked, parts, strict=True))


def split(texts: Sequence[Text], measured: bool = True) -> tuple[Parts, str]:
    """Deal out the texts of each task; return the parts, and what separates them: sources, else documents, else places.

    Args:
        measured: whether one part is to be measured on.

    Raises:
        DraftsmithError: there is too little text.
    """
    wanted = PARTS if measured else (TRAINING, TUNING)
    for by, name in ((SOURCE, source_or_document), (DOCUMENT, lambda text: text.key)):
        parts = _split_by(texts, name, measured)
        if all(parts[part] for part in wanted):
            return parts, by
    parts = {part: [] for part in PARTS}
    for text in texts:
        for part, content in zip(wanted, _places(text.content, len(wanted)), strict=False):
            parts[part].append(replace(text, content=content))
    if not all(parts[part] for part in wanted):
        raise DraftsmithError(
            f"the data hold too little to be told apart ({len(texts)} documents): a comparison needs some to train on, "
            f"some to tune on{' and some to measure on' if measured else ''}; give at least {len(wanted)} documents."
        )
    return parts, PLACE


def source_or_document(text: Text) -> str:
    """Return the source of a text, or its hash where the source is unknown."""
    return text.source or text.key


def _split_by(texts: Sequence[Text], name: Callable[[Text], str], measured: bool) -> Parts:
    by_task: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        by_task[text.task].append(name(text))
    dealt: dict[str, str] = {}
    for names in by_task.values():
        # A source that occurs in two tasks still belongs to one part.
        dealt |= deal((one for one in names if one not in dealt), measured)
    parts: Parts = {part: [] for part in PARTS}
    for text in texts:
        parts[dealt[name(text)]].append(text)
    return parts


def _places(content: Document, count: int) -> list[str]:
    """Return the beginning of a text, and tenths of it from its end; conversations cannot be cut."""
    if not isinstance(content, str):
        return []
    tenths = cut_text(content, max(1, -(-len(content) // 10)))
    own = len(tenths) - (count - 1)
    return ["".join(tenths[:own]), *tenths[own:]] if own > 0 else []


def spread(texts: Iterable[Text]) -> list[Text]:
    """Return the texts in an order that does not depend on their original order, and is always the same."""
    return sorted(texts, key=lambda text: text.key)


def of_other_sources(texts: Sequence[Text], measured: Sequence[Text]) -> list[Text]:
    """Return the texts whose source is not measured on; all texts if too few would be left to train and tune on."""
    sources = {text.source for text in measured} - {""}
    others = [text for text in texts if text.source not in sources]
    return others if len(others) > 1 else list(texts)


def keep_apart(parts: Parts, of_prompts: int = 0) -> tuple[Parts, Found]:
    """Remove texts that overlap with other parts from training and tuning; return what is kept and what was found.

    Args:
        of_prompts: number of texts that were already left out because they share a source with the prompts.

    Raises:
        DraftsmithError: nothing to train on, or nothing to tune on, remains.
    """
    left_out = Counter({OWN_SOURCE: of_prompts})
    kept = dict(parts)
    common = _common(kept)
    known: set[str] = set()
    windows: set[int] = set()
    for part, above in ((TUNING, MEASURED), (TRAINING, TUNING)):
        known |= {text.key for text in kept[above]}
        windows |= _windows(kept[above]) - common
        remaining = []
        for text in kept[part]:
            reason = SAME_TEXT if text.key in known else SAME_WORDS if not windows.isdisjoint(text.windows()) else ""
            left_out[reason] += 1
            if not reason:
                remaining.append(text)
        kept[part] = remaining
        if not remaining:
            raise DraftsmithError(
                f"nothing is left for {part}: every text shares {WINDOW} words in a row with what is measured or tuned "
                "on; give more data, or other prompts."
            )
    return kept, _found(kept, {reason: count for reason, count in left_out.items() if reason and count}, common)


def _windows(texts: Iterable[Text]) -> set[int]:
    return {window for text in texts for window in text.windows()}


def _common(parts: Parts) -> set[int]:
    """Return the runs of words in the tuned and measured texts that more than `COMMON` texts contain."""
    looked_for = _windows([*parts[TUNING], *parts[MEASURED]])
    counts = Counter(w for texts in parts.values() for text in texts for w in text.windows() if w in looked_for)
    return {window for window, count in counts.items() if count > COMMON}


def _found(parts: Parts, left_out: Mapping[str, int], common: set[int]) -> Found:
    """Check the remaining texts once more, comparing two parts at a time."""
    sources: set[str] = set()
    texts, shared = 0, set[int]()
    for one, other in ((TRAINING, TUNING), (TRAINING, MEASURED), (TUNING, MEASURED)):
        sources |= {text.source for text in parts[one]} & {text.source for text in parts[other]} - {""}
        texts += len({text.key for text in parts[one]} & {text.key for text in parts[other]})
        own = _windows(parts[other])
        shared |= {window for text in parts[one] for window in text.windows() if window in own}
    return Found(left_out, sorted(sources), texts, len(shared - common), len(shared & common))
