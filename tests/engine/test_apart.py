"""How far apart texts are in how often guesses stay, from the latest of them."""

import math

import pytest

from draftsmith.engine.apart import COUNTS, LATEST, USUALLY, Apart, moved
from draftsmith.engine.evidence import PRIOR, Evidence, Tally, Usual
from draftsmith.engine.known import ODDS, USUAL

KEPT = [min(4.0, 1.5 * odds) for odds in ODDS]
"""One and a half guesses stay where it was measured."""
AS_USUAL = Usual(1.0, 1.0, 1.0)


def text(times: float, expected: float = 1e6) -> Evidence:
    """A text in which guesses stayed so many times as often as usual, of which so many were expected to."""
    own = Evidence(stayed=Tally(times * expected, expected, PRIOR))
    own.settle(AS_USUAL, KEPT)
    return own


def deviation(*texts: Evidence) -> float:
    found = Apart()
    for own in texts:
        found.note(own, AS_USUAL, KEPT)
    return found.deviation


def test_it_begins_as_usual_and_follows_the_texts():
    assert deviation() == USUALLY
    alike, different = deviation(*map(text, [1.0] * 40)), deviation(*map(text, [2.0, 0.5] * 20))
    assert alike == pytest.approx(USUALLY * math.sqrt(COUNTS / (COUNTS + 40)), rel=0.01)
    assert 0.8 * math.log(2) < different < math.log(2)


def test_a_text_counts_once_however_often_it_is_looked_at_and_old_ones_not_at_all():
    found, once = Apart(), text(2.0)
    for _ in range(100):
        found.note(once, AS_USUAL, KEPT)
    assert found.deviation == deviation(text(2.0))
    for _ in range(LATEST):
        found.note(text(1.0), AS_USUAL, KEPT)
    assert found.deviation == deviation(*(text(1.0) for _ in range(LATEST)))


def test_what_is_hardly_known_of_a_text_hardly_counts():
    little, much = text(2.0, expected=PRIOR / 8), text(2.0)
    assert little.unknown == pytest.approx(8 / 9) and much.unknown < 0.01
    assert USUALLY * 0.95 < deviation(little) < USUALLY * 1.1 < deviation(much)


@pytest.mark.parametrize(("odds", "by", "found"), [
    (USUAL, 0.0, USUAL), (USUAL, math.log(2), 2 * USUAL), (USUAL, -math.log(2), USUAL // 2), (USUAL, 9.0, len(ODDS) - 1)
])
def test_odds_move_by_logarithms(odds: int, by: float, found: int):
    assert moved(odds, by) == found
