"""Where one text is in its grammar, and what may follow its newest token and every guess of a draft.

Shapes: N drafted nodes, M = N + 1 verified nodes (root first), W words of 32 tokens.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.types import UNUSED

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

EVERY = -1
"""A word of a mask that allows all of its tokens."""
MOST_SECONDS = 1.0
"""How long a step may take to find out what a grammar allows; an ambiguous grammar can get slower with every token."""
MOST_SECONDS_OF_GUESSES = 0.25
"""How long a step may take to check guesses that can be removed; the rest are removed, as not worth more time."""

SLOW = f"its constraint takes more than {MOST_SECONDS:g} seconds for a token; make it simpler."
DEAD_END = "none of the target's tokens can follow under its constraint; change the constraint."


class Guide:
    """The state of one request's constraint; only committed tokens move it.

    Args:
        grammar: what the text has to be.
        ends: tokens that end the text; each is allowed where the grammar may end, and nowhere else.
        silent: tokens that write nothing: special ones, and ids without a token; only those in `ends` are allowed.
        width: of the logits.
    """

    def __init__(
        self, grammar: "CompiledGrammar", ends: frozenset[int], silent: frozenset[int], width: int
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar, override_stop_tokens=sorted(ends) or None)
        self._forbidden = silent - ends
        self._next_1W = torch.empty((1, -(-width // 32)), dtype=torch.int32)
        self.refused = 0
        """How many guesses of the last draft were forbidden but had to stay in it, because they were drawn."""
        self.error: str | None = None
        self.is_over = False
        """Whether nothing can follow the tokens so far: the text is complete, or `error` says why it cannot be."""
        self.look_ahead()

    @property
    def words(self) -> int:
        """W."""
        return self._next_1W.shape[1]

    def look(self, tokens: Sequence[int], parents: Sequence[int], bits_MW: Tensor, removes: bool) -> list[bool]:
        """Fill in what may follow the root (row 0) and every guess (row n + 1); return which guesses are allowed.

        A row allows everything if its guess is forbidden or ends the text: what is chosen there is never committed.

        Args:
            removes: whether guesses that are not allowed are removed from the draft. If so, guesses that there is no
                time for count as not allowed; if not, running out of time ends the text with an error.
        """
        bits_MW.fill_(EVERY)
        bits_MW[0] = self._next_1W[0]
        below: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for node, parent in enumerate(parents):
            if parent != UNUSED:
                below[parent + 1].append(node)
        allowed = [False] * len(tokens)
        if not below[0]:
            return allowed
        words_MW = bits_MW.numpy()
        until = time.monotonic() + (MOST_SECONDS_OF_GUESSES if removes else MOST_SECONDS)

        def go(row: int) -> None:
            for node in below[row]:
                token = tokens[node]
                if not int(words_MW[row, token >> 5]) >> (token & 31) & 1:
                    continue
                if time.monotonic() > until:
                    if not removes:
                        self._give_up()
                    return
                allowed[node] = self._matcher.accept_token(token)
                if not allowed[node]:
                    continue
                if not self._matcher.is_terminated():
                    self._matcher.fill_next_token_bitmask(bits_MW, node + 1)
                    if words_MW[node + 1].any():
                        go(node + 1)
                    else:
                        words_MW[node + 1] = EVERY
                self._matcher.rollback(1)

        go(0)
        return allowed

    def take(self, token: int) -> bool:
        """Go on by one committed token; return False, and stay, if it cannot follow because the text is over."""
        if self.is_over or self._matcher.is_terminated() or token in self._forbidden:
            return False
        begun = time.monotonic()
        accepted = bool(self._matcher.accept_token(token))
        if time.monotonic() - begun > MOST_SECONDS:
            self._give_up()
        return accepted

    def look_ahead(self) -> None:
        """Find out what may follow, after all tokens of a step were taken."""
        if self.is_over or self._matcher.is_terminated():
            self.is_over = True
            return
        begun = time.monotonic()
        self._matcher.fill_next_token_bitmask(self._next_1W, 0)
        if not bool(self._next_1W.any()):
            self.is_over = True
            if not self._matcher.is_completed():
                self.error = DEAD_END
        elif time.monotonic() - begun > MOST_SECONDS:
            self._give_up()

    def _give_up(self) -> None:
        self.is_over = True
        self.error = SLOW
