"""Prompt lookup: guesses what followed the newest tokens at their last occurrence, in the prompt or in the output.

The idea is Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023), and that of Yang et
al., "Inference with Reference" (arXiv:2304.04487, section 3). Every n-gram of a row is indexed once, so a step looks up
and never searches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.drafters.lookup.ngram_config import Match, NgramConfig
from draftsmith.drafters.lookup.python_drafter import (
    DraftTree,
    K,
    LookupDrafter,
    PythonDrafter,
)
from draftsmith.drafters.lookup.unread import Unread, joined
from draftsmith.native import LIBRARY, NativeObject
from draftsmith.plan import NO_COPY, Plan
from draftsmith.types import ROOT, Context, Draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache, Target

NOWHERE = -1
OWN = 8
"""Guesses of its own plan if nothing limits them by the length of a match: more would fail too often."""
# Only this many of an n-gram's latest places are examined; common words of a long text have thousands.
MOST_PLACES = 64


class NgramIndex:
    """A growing text, and the places behind each of its n-grams, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.text: list[int] = []
        self._longest = longest
        # The latest place behind each n-gram, and for every place the one before it, for each length.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[tuple[int, list[int]]] = [(n, []) for n in range(shortest, longest + 1)]

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens; they are indexed only when something is looked up."""
        self.text += tokens

    def _index(self) -> None:
        """Index the n-grams before each of the tokens added since the last call."""
        text, latest = self.text, self._latest
        for n, earlier in self._earlier:
            for place in range(len(earlier), len(text)):
                if place < n:
                    earlier.append(NOWHERE)
                    continue
                gram = tuple(text[place - n : place])
                earlier.append(latest.get(gram, NOWHERE))
                latest[gram] = place

    def places(self, match: Match, wanted: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return up to `wanted` places to continue from, longer matches first, each with a different next token.

        Args:
            ahead: tokens behind the text; they take part in the match, but are not indexed.
        """
        self._index()
        text = self.text
        newest = [*text[-self._longest :], *ahead]
        found: dict[int, int] = {}
        for n, earlier in reversed(self._earlier):
            if n > len(newest):
                continue
            times: dict[int, int] = {}
            first: dict[int, int] = {}
            place, left = self._latest.get(tuple(newest[-n:]), NOWHERE), MOST_PLACES
            while place != NOWHERE and left and (match == "frequent" or len(first) < wanted):
                token = text[place]
                times[token] = times.get(token, 0) + 1
                first.setdefault(token, place)
                place, left = earlier[place], left - 1
            # Sorting is stable, so the more recent of equally frequent ones comes first.
            order = sorted(first, key=lambda token: -times[token]) if match == "frequent" else first
            for token in order:
                found.setdefault(token, first[token])
            if len(found) >= wanted:
                break
        return list(found.values())[:wanted]

    def worth(self, place: int, count: int, factor: float | None, ahead: Sequence[int] = ()) -> int:
        """Return how many of `count` guesses the match before a place is worth; see `Plan.factor`."""
        if factor is None:
            return count
        text, newest, matched = self.text, len(ahead), 0

        def token(back: int) -> int:
            return ahead[newest - 1 - back] if back < newest else text[newest - 1 - back]

        while factor * matched < count and matched < place and text[place - 1 - matched] == token(matched):
            matched += 1
        return int(min(count, factor * matched))

    def copy(self, place: int, count: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return `count` tokens from `place` on; where the text and `ahead` end, the copy repeats itself."""
        piece = self.text[place : place + count]
        piece += ahead[: count - len(piece)]
        return piece if len(piece) == count else (piece * (count // len(piece) + 1))[:count]


class NgramLookup(LookupDrafter[K]):
    """Drafts the continuation of an earlier occurrence of the newest tokens, or nothing if there is none."""

    config: NgramConfig

    def default_plan(self) -> Plan:
        depth = self.config.guesses if self.config.factor else min(OWN, self.config.guesses)
        return Plan((self.config.branches,) + (1,) * (depth - 1))

    def factor(self, plan: Plan) -> float | None:
        """Return the guesses per token of a match: the plan's or the drafter's own number, whichever is smaller."""
        return min((factor for factor in (plan.factor, self.config.factor) if factor is not None), default=None)


def factors_of(config: NgramConfig) -> tuple[float, ...]:
    """Return the limits by the length of a match that are worth setting besides the drafter's own."""
    return (1.0, 0.5) if config.factor is None else (config.factor / 2,)


class NgramDrafter(PythonDrafter[NgramIndex], NgramLookup[NgramIndex]):
    """The Python version, which serves as the reference."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config, self.factors, self.longest = config, factors_of(config), config.guesses

    def new_row(self) -> NgramIndex:
        return NgramIndex(self.config.min_length, self.config.max_length)

    def draft_row(self, row: NgramIndex, plan: Plan, room: int) -> DraftTree:
        config, factor, tree = self.config, self.factor(plan), DraftTree(plan.branching, room)
        for place in row.places(config.match, min(config.branches, plan.branching[0])):
            tree.add_path(ROOT, row.copy(place, row.worth(place, min(config.guesses, plan.depth), factor)))
        return tree

    def continue_row(self, row: NgramIndex, ahead: Sequence[int], count: int) -> list[int]:
        found, most = row.places(self.config.match, 1, ahead), min(count, self.config.guesses)
        return row.copy(found[0], row.worth(found[0], most, self.config.factor, ahead), ahead) if found else []


class NativeNgramDrafter(NgramLookup[int]):
    """The version with a native operator, which also keeps the texts of all rows: a lookup costs a row microseconds.

    Rows are identified by their numbers.
    """

    def __init__(self, config: NgramConfig) -> None:
        self.config, self.factors, self.longest = config, factors_of(config), config.guesses
        self._texts = self._no_texts()
        self._unread = Unread()

    def __deepcopy__(self, _: Any) -> "NativeNgramDrafter":
        """Return a drafter with the same options and no texts; two drafters must not write into the same texts."""
        return NativeNgramDrafter(self.config)

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        # A core that was dropped halfway did not report that its rows ended, and other rows may get their numbers.
        self._texts = self._no_texts()
        self._unread.clear()

    def reset_rows(self, rows: list[int]) -> None:
        self._unread.end(rows)

    def follow(self, context: Context) -> None:
        if self._unread.add(context):
            self._catch_up()

    def propose(self, context: Context, plan: Plan) -> Draft:
        config = self.config
        if plan.factor == NO_COPY:
            self.follow(context)
            nothing_B0 = context.tokens_BT[:, :0]
            return Draft(nothing_B0, nothing_B0, 0, branching=())
        self._catch_up()
        rows_B, counts_B, tokens_BT = joined([(context.rows_B, context.counts_B, context.tokens_BT)])
        found_2BN, depth = self._texts(
            [rows_B], [counts_B], [tokens_BT], min(config.branches, plan.branching[0]), config.match == "frequent",
            min(config.guesses, plan.depth), plan.max_nodes, self.factor(plan) or 0.0,
        )
        tokens_BN, parents_BN = found_2BN.to(context.tokens_BT.device).unbind(0)
        return Draft(tokens_BN, parents_BN, depth, branching=plan.branching if depth else ())

    def take_in(self, context: Context) -> list[int | None]:
        self.follow(context)
        self._catch_up()
        return [number if number >= 0 else None for number in context.rows_B.tolist()]

    def continue_row(self, row: int, ahead: Sequence[int], count: int) -> list[int]:
        frequent, most = self.config.match == "frequent", min(count, self.config.guesses)
        found: list[int] = self._texts.by("continue_ngrams", row, ahead, frequent, most, self.config.factor or 0.0)
        return found

    def _no_texts(self) -> NativeObject:
        return NativeObject("make_ngrams", "draft_ngrams", self.config.min_length, self.config.max_length)

    def _catch_up(self) -> None:
        """Read what was collected."""
        for news, ended in self._unread.take():
            try:
                if news:
                    rows, counts, tokens = zip(*news, strict=True)
                    self._texts.by("read_ngrams", list(rows), list(counts), list(tokens))
            finally:
                if ended:
                    self._texts.by("forget_ngrams", ended)


def make_ngram(config: NgramConfig, target: "Target", draft_tokens: Tensor | None) -> NgramLookup[Any]:
    """Make a drafter that is ready; it needs neither the target nor a list of tokens."""
    return NativeNgramDrafter(config) if LIBRARY else NgramDrafter(config)
