"""Whether a text ends in a loop: the same tokens over and over, as small models write them greedily."""

from collections.abc import Sequence

TIMES = 3
LEAST = 24
WINDOW = 4


def loop_period(tokens: Sequence[int]) -> int | None:
    """Return the number of tokens of the loop that a text ends in; None where it does not end in a loop.

    A loop is the same tokens at least three times in a row, and at least 24 tokens in all. The text may end in the
    middle of a repetition. Of several possible loops the shortest counts.
    """
    for period in range(1, len(tokens) // TIMES + 1):
        span = max(LEAST, TIMES * period)
        if span > len(tokens):
            break
        tail = tokens[len(tokens) - span :]
        if all(tail[index] == tail[index - period] for index in range(period, span)):
            return period
    return None


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of runs of four tokens that occurred before in the same text, 0 for a shorter text.

    This also finds loops with small changes, such as lines that count up.
    """
    runs = [tuple(tokens[index : index + WINDOW]) for index in range(len(tokens) - WINDOW + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
