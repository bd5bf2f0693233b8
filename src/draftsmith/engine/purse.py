"""What trials may cost. They are paid from a share of all tokens, and from what drafts are expected to have gained.

So where no trial leads to drafting, all trials together cost a hundredth or two of the time, however many texts are
written and however short they are; and where trials do lead to drafting, there are soon more of them.
"""

from math import ceil

LOST, LOST_LITTLE = 0.02, 0.01
"""The share of all tokens that trials may cost if none of them leads to drafting: of a greedy text by itself, which may
begin to repeat itself, and where there is less to gain, as in sampled texts and in several rows that take one plan."""
GAINED = 0.05
"""The share of what drafts gain over plain decoding that may be spent on further trials."""
LENT, LENT_LITTLE = 6.0, 3.0
"""What may be owed for trials in greedy texts, in tokens of each row, which is enough for a trial or two: where nothing
is drafted in a text by itself, and for several rows or where other drafts pay already, so that there is less to gain.
"""
SAVED = 24.0
"""The most that is saved up, in tokens of each row."""
MOST_CHARGED = 8.0
"""The most that the steps of a trial are charged for between two questions, in tokens of each row: if they took longer
still, the cause was something else, such as another program."""


class Purse:
    """Tokens that may be lost to trials; sampled texts and greedy ones apart.

    All that goes in and out is told as tokens of each of `rows` rows.
    """

    def __init__(self) -> None:
        self._held = {False: 0.0, True: 0.0}

    def earn(self, sampled: bool, tokens: float, gained: float = 0.0, rows: int = 1) -> None:
        """Take in how many tokens were written, and how many more these are expected to be than without drafts."""
        self._add(sampled, rows * (share_lost(sampled, rows) * tokens + GAINED * max(0.0, gained)), rows)

    def pay(self, sampled: bool, tokens: float, lent: float, rows: int = 1) -> bool:
        """Pay for a trial that may lose so many tokens, some of them `lent`; return whether there was enough."""
        if self._held[sampled] + rows * lent < rows * tokens:
            return False
        self._held[sampled] -= rows * tokens
        return True

    def charge(self, sampled: bool, tokens: float, rows: int = 1) -> None:
        """Pay what a trial lost beyond what was paid for it; a negative number is given back."""
        self._add(sampled, -rows * min(MOST_CHARGED, max(-MOST_CHARGED, tokens)), rows)

    def _add(self, sampled: bool, tokens: float, rows: int) -> None:
        # Not more is owed than may be saved, so that what a crowd has lost does not keep a single text from trials.
        self._held[sampled] = max(-rows * SAVED, min(rows * SAVED, self._held[sampled] + tokens))

    def tokens_until(self, sampled: bool, tokens: float, lent: float, rows: int = 1) -> int:
        """Return how many tokens have to be written before a trial that may lose so many can be paid."""
        return ceil(max(0.0, tokens - lent - self._held[sampled] / rows) / share_lost(sampled, rows))


def share_lost(sampled: bool, rows: int = 1) -> float:
    """Return the share of the tokens of such texts that trials may cost."""
    return LOST_LITTLE if sampled or rows > 1 else LOST
