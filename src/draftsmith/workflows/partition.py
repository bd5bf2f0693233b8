"""Texts to train on, to tune on and to measure on, told apart by where they come from, and the check that they are.

A source is a package, a book, a template: whatever a record names as its `source`. No source is in two parts. Where
nobody said the sources, or there are too few of them, documents are told apart, and of too few documents their
beginning, middle and end. Whatever shares a text with another part, or 13 words in a row, is left out of the training.
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
"""What parts may be told apart by."""
WINDOW = 13
"""So many words in a row that two texts share make one of them known to who has read the other (arXiv:2005.14165)."""
COMMON = 10
"""Words in a row that more documents than this have are a heading or a licence, and make nothing known."""
MOST_TUNING, MOST_MEASURED = 20, 40
"""Of many sources or documents, no more are kept from the training."""
PIECE = 2000
"""Long texts are cut into pieces of so many characters, each drawn as often and left out as one."""
OWN_SOURCE = "of a source of the prompts"
SAME_TEXT = "the same text as one of another part"
SAME_WORDS = f"{WINDOW} words in a row of another part"
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Text:
    """A document, or a piece of one, with the task it stands for and its source, "" where nobody said."""

    task: str
    source: str
    content: Document

    @cached_property
    def words(self) -> list[str]:
        """What it says, in lower case; without system prompts, which many conversations have in common."""
        return _WORD.findall(said(self.content).lower())

    @cached_property
    def key(self) -> str:
        """What two texts share that say the same."""
        return hashlib.sha256(" ".join(self.words).encode("utf-8", "surrogatepass")).hexdigest()

    def windows(self) -> set[int]:
        """Return all words in a row of it, each as a hash."""
        words = self.words
        return {hash(" ".join(words[at : at + WINDOW])) for at in range(len(words) - WINDOW + 1)}

    def pieces(self) -> list["Text"]:
        """Cut it where it is long; conversations and completions stay whole."""
        if not isinstance(self.content, str):
            return [self]
        return [replace(self, content=part) for part in cut_text(self.content, PIECE)]


Parts = dict[str, list[Text]]


@dataclass(frozen=True)
class Found:
    """What the check found: `shared` counts what two parts still have in common, `left_out` what was left out for it.

    `common` counts words in a row that parts share but many documents have, and that were passed over.
    """

    left_out: Mapping[str, int]
    shared_sources: Sequence[str]
    shared_texts: int
    shared_windows: int
    common: int


def said(content: Document) -> str:
    """Return what is said in a document."""
    if isinstance(content, Conversation):
        turns = [message for message in content.messages if message["role"] != "system"]
        return "\n".join(str(turn.get("content") or "") for turn in turns)
    return content.prompt + content.completion if isinstance(content, Completion) else content


def deal(names: Iterable[str], measured: bool = True) -> dict[str, str]:
    """Say of each name which part it belongs to: about a third is measured on, a sixth is tuned on.

    Who belongs where depends on the names alone. One alone is trained on, of two one is measured on (or tuned on, where
    nothing is to be measured on).
    """
    ranked = sorted(set(names), key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest())
    total = len(ranked)
    kept = min(MOST_MEASURED, max(1, round(total / 3))) if measured and total > 1 else 0
    tuned = min(MOST_TUNING, max(1, round(total / 6))) if total - kept > 1 else 0
    parts = [MEASURED] * kept + [TUNING] * tuned + [TRAINING] * (total - kept - tuned)
    return dict(zip(ranked, parts, strict=True))


def split(texts: Sequence[Text], measured: bool = True) -> tuple[Parts, str]:
    """Deal texts out, every task by itself, and say by what: sources, else documents, else places in the documents.

    Args:
        measured: whether some are to be measured on.

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
    """Return the source of a text, or what stands for it where nobody said."""
    return text.source or text.key


def _split_by(texts: Sequence[Text], name: Callable[[Text], str], measured: bool) -> Parts:
    by_task: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        by_task[text.task].append(name(text))
    dealt: dict[str, str] = {}
    for names in by_task.values():
        # Who is in two tasks is in one part all the same.
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
    """Return texts in an order that has nothing to do with where they stood, the same for the same texts."""
    return sorted(texts, key=lambda text: text.key)


def of_other_sources(texts: Sequence[Text], measured: Sequence[Text]) -> list[Text]:
    """Return the texts whose source is not measured on; all of them where that leaves too few to train and tune on."""
    sources = {text.source for text in measured} - {""}
    others = [text for text in texts if text.source not in sources]
    return others if len(others) > 1 else list(texts)


def keep_apart(parts: Parts, of_prompts: int = 0) -> tuple[Parts, Found]:
    """Leave out of the training what the other parts know, and of the tuning what is measured on; say what was found.

    Args:
        of_prompts: texts that were left out already because the prompts are of their source.

    Raises:
        DraftsmithError: nothing to train on or to tune on remains.
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
    """Return which words in a row of those that are tuned or measured on many texts have."""
    looked_for = _windows([*parts[TUNING], *parts[MEASURED]])
    counts = Counter(w for texts in parts.values() for text in texts for w in text.windows() if w in looked_for)
    return {window for window, count in counts.items() if count > COMMON}


def _found(parts: Parts, left_out: Mapping[str, int], common: set[int]) -> Found:
    """Look once more at what remains, two parts at a time."""
    sources: set[str] = set()
    texts, shared = 0, set[int]()
    for one, other in ((TRAINING, TUNING), (TRAINING, MEASURED), (TUNING, MEASURED)):
        sources |= {text.source for text in parts[one]} & {text.source for text in parts[other]} - {""}
        texts += len({text.key for text in parts[one]} & {text.key for text in parts[other]})
        own = _windows(parts[other])
        shared |= {window for text in parts[one] for window in text.windows() if window in own}
    return Found(left_out, sorted(sources), texts, len(shared - common), len(shared & common))
