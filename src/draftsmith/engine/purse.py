"""What trials may cost. They are paid from a share of all tokens, and from what drafts are expected to have gained.

So where no trial leads to drafting, all trials together cost a hundredth or two of the time, however many texts are
written and however short they are; and where trials do lead to drafting, there are soon more of them.
"""

from math import ceil

LOST, LOST_SAMPLED = 0.02, 0.01
"""The share of all tokens that trials may cost if none of them leads to drafting. Greedy texts may begin to repeat
themselves, which sampled ones seldom do."""
GAINED = 0.1
"""The share of what drafts gain over plain decoding that may be spent on further trials."""
LENT, LENT_BESIDE = 6.0, 3.0
"""What may be owed for trials in greedy texts, in tokens of each row, which is enough for a trial or two: where nothing
is drafted, and where other drafts pay already, so that there is less to gain."""
SAVED = 24.0
"""The most that is saved up, in tokens of each row."""


class Purse:
    """Tokens that may be lost to trials; sampled texts and greedy ones apart.

    All that goes in and out is told as tokens of each of `rows` rows.
    """

    def __init__(self) -> None:
        self._held = {False: 0.0, True: 0.0}

    def earn(self, sampled: bool, tokens: float, gained: float = 0.0, rows: int = 1) -> None:
        """Take in how many tokens were written, and how many more these are expected to be than without drafts."""
        found = self._held[sampled] + rows * (share_lost(sampled) * tokens + GAINED * max(0.0, gained))
        self._held[sampled] = min(rows * SAVED, found)

    def pay(self, sampled: bool, tokens: float, lent: float, rows: int = 1) -> bool:
        """Pay for a trial that may lose so many tokens, some of them `lent`; return whether there was enough."""
        if self._held[sampled] + rows * lent < rows * tokens:
            return False
        self._held[sampled] -= rows * tokens
        return True

    def tokens_until(self, sampled: bool, tokens: float, lent: float, rows: int = 1) -> int:
        """Return how many tokens have to be written before a trial that may lose so many can be paid."""
        return ceil(max(0.0, tokens - lent - self._held[sampled] / rows) / share_lost(sampled))


def share_lost(sampled: bool) -> float:
    """Return the share of the tokens of such texts that trials may cost."""
    return LOST_SAMPLED if sampled else LOST
