"""Prompt lookup: what followed the newest tokens where they last stood, in the prompt or in the output.

The idea is Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023), and that of Yang et
al., "Inference with Reference" (arXiv:2304.04487, section 3). Every n-gram of a row is indexed once, so a step looks up
and never searches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from draftsmith.drafters.lookup.ngram_config import Match, NgramConfig
from draftsmith.drafters.lookup.python_drafter import SURE_MATCH, DraftTree, LookupDrafter
from draftsmith.plan import Plan
from draftsmith.types import ROOT

if TYPE_CHECKING:
    from draftsmith.targets import Target

NOWHERE = -1
# Only so many of the latest places of an n-gram are looked at; common words of a long text have thousands.
MOST_PLACES = 64


class NgramIndex:
    """A growing text, and where each of its n-grams was followed by what; n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.text: list[int] = []
        self._longest = longest
        # The latest place behind each n-gram, and for every place the one before it, length by length.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[tuple[int, list[int]]] = [(n, []) for n in range(shortest, longest + 1)]

    def extend(self, tokens: list[int]) -> None:
        """Add committed tokens; they are indexed when somebody looks something up."""
        self.text += tokens

    def _index(self) -> None:
        """File the n-grams that each of the tokens since the last time follows."""
        text, latest = self.text, self._latest
        for n, earlier in self._earlier:
            for place in range(len(earlier), len(text)):
                if place < n:
                    earlier.append(NOWHERE)
                    continue
                gram = tuple(text[place - n : place])
                earlier.append(latest.get(gram, NOWHERE))
                latest[gram] = place

    def places(self, match: Match, wanted: int, ahead: Sequence[int] = (), shortest: int = 0) -> list[int]:
        """Return up to `wanted` places to continue from: of longer matches first, each with another token there.

        Args:
            ahead: tokens behind the text, which belong to the match but not to the index.
            shortest: of the newest tokens, so many have to stand before a place; without any `ahead`.
        """
        self._index()
        text = self.text
        newest = [*text[-self._longest :], *ahead]
        found: dict[int, int] = {}
        # Whatever follows so many tokens also follows the longest n-gram of them.
        lengths = self._earlier[-1:] if shortest >= self._longest else self._earlier
        for n, earlier in reversed(lengths):
            if n > len(newest):
                continue
            times: dict[int, int] = {}
            first: dict[int, int] = {}
            place, left = self._latest.get(tuple(newest[-n:]), NOWHERE), MOST_PLACES
            while place != NOWHERE and left and (match == "frequent" or len(first) < wanted):
                if shortest <= n or self._repeats(place, shortest):
                    token = text[place]
                    times[token] = times.get(token, 0) + 1
                    first.setdefault(token, place)
                place, left = earlier[place], left - 1
            # Sorting keeps the more recent of equally frequent ones in front.
            order = sorted(first, key=lambda token: -times[token]) if match == "frequent" else first
            for token in order:
                found.setdefault(token, first[token])
            if len(found) >= wanted:
                break
        return list(found.values())[:wanted]

    def _repeats(self, place: int, tokens: int) -> bool:
        """Return whether so many of the newest tokens stand before a place too."""
        return tokens <= place and self.text[place - tokens : place] == self.text[-tokens:]

    def copy(self, place: int, count: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return `count` tokens from `place` on; behind the end of text and `ahead` the copy goes on with itself."""
        piece = self.text[place : place + count]
        piece += ahead[: count - len(piece)]
        return piece if len(piece) == count else (piece * (count // len(piece) + 1))[:count]


class NgramDrafter(LookupDrafter[NgramIndex]):
    """Drafts the continuation of an earlier occurrence of the newest tokens, and nothing when there is none."""

    matches = (SURE_MATCH,)

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self.config = config

    def default_plan(self) -> Plan:
        return Plan((self.config.branches,) + (1,) * (self.config.guesses - 1))

    def new_row(self) -> NgramIndex:
        return NgramIndex(self.config.min_length, self.config.max_length)

    def draft_row(self, row: NgramIndex, plan: Plan, room: int) -> DraftTree:
        config, tree = self.config, DraftTree(plan.branching, room)
        for place in row.places(config.match, min(config.branches, plan.branching[0]), shortest=plan.match):
            tree.add_path(ROOT, row.copy(place, min(config.guesses, plan.depth)))
        return tree

    def continue_row(self, row: NgramIndex, ahead: Sequence[int], count: int) -> list[int]:
        found = row.places(self.config.match, 1, ahead)
        return row.copy(found[0], min(count, self.config.guesses), ahead) if found else []


def make_ngram(config: NgramConfig, target: "Target", draft_tokens: Tensor | None) -> NgramDrafter:
    """Make a drafter that is ready; it needs neither the target nor a list of tokens."""
    return NgramDrafter(config)
