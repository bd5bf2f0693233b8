"""A first look at the data: the lengths of its documents, which tokens are learnt, and how many there are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from draftsmith.training.data.reader import Reader, Unusable
from draftsmith.training.data.sources import Source
from draftsmith.training.sections import DataSection
from draftsmith.types import DraftsmithError

PIECES, TOKENS = 500, 400_000
"""At most this much of each source is read."""


@dataclass(frozen=True)
class Survey:
    """Lengths of the pieces in tokens, shortest first; how often each token is learnt; whether that is all data."""

    lengths: Sequence[int]
    counts: Counter[int]
    whole: bool

    def quantile(self, share: float) -> int:
        """Return the length that this share of the pieces does not exceed."""
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))]

    def coverage(self, size: int) -> float:
        """Return the share of the learnt tokens that belong to the `size` most frequent ones."""
        return sum(count for _, count in self.counts.most_common(size)) / max(1, self.counts.total())


def survey(section: DataSection, reader: Reader) -> Survey:
    """Read the beginning of every source; DraftsmithError if nothing in it can be learnt."""
    lengths: list[int] = []
    counts: Counter[int] = Counter()
    unusable: Counter[str] = Counter()
    whole = True
    for item in section.sources:
        own, pieces = 0, iter(Source(item, section.held_out_every, section.piece_characters).pieces())
        for piece in islice(pieces, PIECES):
            try:
                window = reader.text(piece)
            except Unusable as error:
                unusable[str(error)] += 1
                continue
            lengths.append(len(window.tokens))
            own += len(window.tokens)
            for begin, end in window.spans:
                counts.update(window.tokens[begin:end])
            if own > TOKENS:
                break
        whole = whole and next(pieces, None) is None
    if not lengths:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in unusable.most_common(3))
        raise DraftsmithError(f"no document in data.sources can be used ({reasons}); add others.")
    return Survey(sorted(lengths), counts, whole)
