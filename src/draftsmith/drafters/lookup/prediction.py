"""Predicted outputs: a text that a request expects is a draft for this request alone.

An edited text is mostly the same as before. So the guesses are the tokens of the prediction behind the place that the
output has reached in it. If the two part, the place is searched by the newest tokens: the longest end of the output
that the prediction contains, the nearest of several. Until it is found, other drafters draft.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup.python_drafter import DraftTree, to_draft
from draftsmith.plan import Plan
from draftsmith.types import ROOT, Context, Draft

MOST_GUESSES = 16
"""The most guesses of a draft, made once enough tokens have agreed."""
FIRST_GUESSES = 4
"""Guesses per draft before any token has agreed."""
LONGEST = 32
"""The most tokens compared to choose between places that agree with the newest tokens."""
NEAR = 8
"""Within this distance ahead of the place where the two parted, one agreeing token suffices; elsewhere two."""
MOST_PLACES = 64
"""At most this many places of a token are examined, the nearest ones."""


class Prediction:
    """What one request expects, and the place that its output has reached in it.

    Args:
        tokens: of the expected text.
        room: the most tokens that the output may have; None for no limit.
    """

    def __init__(self, tokens: Sequence[int], room: int | None = None) -> None:
        self._tokens = list(tokens)
        self._room = sys.maxsize if room is None else room
        # The places of every token, in rising order.
        self._places: dict[int, list[int]] = {}
        for place, token in enumerate(self._tokens):
            self._places.setdefault(token, []).append(place)
        self._newest: list[int] = []
        self._agreed = 0
        self._place = 0
        self._is_lost = False
        self.guessed = 0
        """Number of tokens guessed last, until their step is recorded."""

    @property
    def has_guesses(self) -> bool:
        """Whether the place in the prediction is known, and tokens follow it."""
        # The last token of an output always comes from the target.
        return self._room > 1 and not self._is_lost and self._place < len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Move on by committed tokens of the output."""
        self._room -= len(tokens)
        for token in tokens:
            self._newest.append(token)
            if not self._is_lost and self._place < len(self._tokens) and self._tokens[self._place] == token:
                self._place += 1
                self._agreed += 1
            else:
                del self._newest[:-LONGEST]
                self._find()
        del self._newest[:-LONGEST]

    def guess(self, most: int) -> list[int]:
        """Return up to `most` tokens, more of them the longer the two have agreed; none if they have parted."""
        if not self.has_guesses:
            return []
        count = min(most, FIRST_GUESSES + self._agreed, self._room - 1)
        return self._tokens[self._place : self._place + count]

    def _find(self) -> None:
        """Find the place behind the newest tokens; if there is none, `_place` stays where the two parted."""
        parted, best, found = self._place, (1, 0), None
        places = self._places.get(self._newest[-1], [])
        middle = bisect_left(places, parted)
        for place in places[max(0, middle - MOST_PLACES // 2) : middle + MOST_PLACES // 2]:
            length = self._agreement(place)
            distance = place - parted
            if length == 1 and not 0 <= distance < NEAR:
                continue
            # Places ahead are preferred over passed ones, because a text is written from its beginning on.
            rank = (length, -distance if distance >= 0 else 2 * distance - len(self._tokens))
            if found is None or rank > best:
                best, found = rank, place
        self._is_lost = found is None
        self._agreed = 0 if found is None else best[0]
        if found is not None:
            self._place = found + 1

    def _agreement(self, place: int) -> int:
        """Return how many of the newest tokens agree with the prediction up to this place, the last of them there."""
        newest, tokens = self._newest, self._tokens
        most = min(len(newest), place + 1)
        return next((n for n in range(most) if tokens[place - n] != newest[-1 - n]), most)


class PredictionDrafter(Drafter):
    """Drafts chains for the rows that have a prediction, and nothing for the others.

    It keeps no text: the code that sets a prediction also tells it the request's output.
    """

    taps = ()

    def __init__(self) -> None:
        self._rows: dict[int, Prediction] = {}

    def give(self, row: int, prediction: Prediction) -> None:
        """Give a row a prediction, until it is reset."""
        self._rows[row] = prediction

    def reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def default_plan(self) -> Plan:
        return Plan((1,) * MOST_GUESSES)

    def propose(self, context: Context, plan: Plan) -> Draft:
        trees = []
        for row in context.rows_B.tolist():
            tree, prediction = DraftTree(plan.branching, plan.max_nodes), self._rows.get(row)
            if prediction is not None:
                guesses = prediction.guess(plan.depth)
                tree.add_path(ROOT, guesses)
                prediction.guessed = len(guesses)
            trees.append(tree)
        return to_draft(trees, context, plan)
